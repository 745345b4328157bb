/* The library's entry: which kernels this processor has, and the operators that ONNX Runtime is given. */
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>

#include "operators.h"

#define PUBLIC __attribute__((visibility("default")))

const Kernels *kernels;
static int rounded_steps; /* the largest step of weights that are rounded here: pairs fit 16 bits without VNNI */

const Packed *weights_of(Weights *weights, const Tensor *stored, const float *scale, int by_rows,
                         enum PackedForm form) {
    Packed *packed = __atomic_load_n(&weights->packed, __ATOMIC_ACQUIRE);
    if (packed) return packed;
    size_t depth = (size_t)stored->dims[by_rows ? 1 : 0], columns = (size_t)stored->dims[by_rows ? 0 : 1];
    packed = packed_from(stored->data, scale, depth, columns, by_rows, form, rounded_steps);
    Packed *none = NULL;
    if (__atomic_compare_exchange_n(&weights->packed, &none, packed, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return packed;
    give_back(packed); /* another thread was first: it is the same one */
    return none;
}

const Packed *packed_elsewhere(Weights *weights, const void *stored, size_t depth, size_t columns,
                               enum PackedForm form) {
    Packed *packed = __atomic_load_n(&weights->packed, __ATOMIC_ACQUIRE), *none = NULL;
    if (packed || !(packed = packed_before(stored, depth, columns, form))) return packed;
    if (__atomic_compare_exchange_n(&weights->packed, &none, packed, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return packed;
    give_back(packed); /* another thread was first: it is the same one */
    return none;
}

Steps steps_of(const void *info) {
    Steps steps = {int_attribute(info, "above", 127), int_attribute(info, "zero", 128), 0,
                   float_attribute(info, "least", 0.0f)};
    steps.is_signed = int_attribute(info, "signed", steps.zero == 128);
    return steps;
}

/* Chooses the kernels: `most` 0 for AVX2, 1 for AVX-512 with VNNI where there is. Returns the numbers in a vector; 0
   where this processor has none of them, and operators must not be used. */
PUBLIC int seq2engine_choose(int most) {
    __builtin_cpu_init();
    int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    int avx512 = most && avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                 __builtin_cpu_supports("avx512vnni");
    kernels = avx512 ? &avx512_kernels : avx2 ? &avx2_kernels : NULL;
    rounded_steps = avx512 ? 127 : 64;
    return kernels ? kernels->width : 0;
}

PUBLIC void seq2engine_mapped(const void *start, size_t size, int file) { note_mapped(start, size, file); }

static const char *name(const Operator *op) { return op->called; }
static const char *provider(const Operator *op) { return (void)op, "CPUExecutionProvider"; }
static size_t length(const char *text) { /* of letters: a star says more of the one before it, or of an input */
    size_t count = 0;
    while (text[count] && (text[count] != '*' || !count)) count++;
    return count;
}
static int has_more(const char *text, size_t place) { return text[place] == '*' || text[place + 1] == '*'; }
static int kind_of(const char *text, size_t place) {
    return has_more(text, place) ? VARIADIC : text[place] & 32 ? REQUIRED : OPTIONAL;
}
static size_t input_count(const Operator *op) { return length(op->inputs); }
static size_t output_count(const Operator *op) { return length(op->outputs); }
static int type_of(char letter) {
    switch (letter | 32) {
        case 'f': return FLOAT;
        case 'c': return INT8;
        case 'b': return BOOL;
        case 'i': return INT64;
        case 'd': return DOUBLE;
        default: return ANY_TYPE;
    }
}
static int input_type(const Operator *op, size_t place) { return type_of(op->inputs[place]); }
static int output_type(const Operator *op, size_t place) { return type_of(op->outputs[place]); }
static int input_kind(const Operator *op, size_t place) { return kind_of(op->inputs, place); }
static int output_kind(const Operator *op, size_t place) { return kind_of(op->outputs, place); }
static int default_memory(const Operator *op, size_t place) { return (void)op, (void)place, 0; }
static int one(const Operator *op) { return (void)op, 1; }
static int alike_inputs(const Operator *op) { return op->inputs[0] != '*'; }
static int last_version(const Operator *op) { return (void)op, INT_MAX; }

static Status make_domain(void **domain) {
    Operator *operators[] = {&linear,     &linear_int8,     &self_attention, &cross_attention, &encoder_attention,
                             &candidates, &candidates_int8, &embedding,      &embedding_int8,
                             &source_heads, &step_program, &encoder_program};
    Status failed = ((Status (*)(const char *, void **))runtime[CREATE_DOMAIN])("seq2engine", domain);
    for (size_t i = 0; !failed && i < sizeof operators / sizeof *operators; i++) {
        Operator *op = operators[i];
        op->version = API_VERSION, op->name = name, op->provider = provider;
        op->input_type = input_type, op->input_count = input_count, op->input_kind = input_kind;
        op->output_type = output_type, op->output_count = output_count, op->output_kind = output_kind;
        op->input_memory = default_memory, op->first_version = one, op->last_version = last_version;
        op->least_variadic_inputs = one, op->alike_variadic_inputs = alike_inputs;
        op->least_variadic_outputs = op->alike_variadic_outputs = one;
        failed = ((Status (*)(void *, const Operator *))runtime[ADD_OPERATOR])(*domain, op);
    }
    return failed;
}

/* ONNX Runtime calls this for the options of every session; the domain is made once. */
PUBLIC Status RegisterCustomOps(void *options, const ApiBase *base) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static void *domain;
    Status failed = NULL;
    pthread_mutex_lock(&lock);
    runtime = base->functions(API_VERSION);
    if (!kernels) seq2engine_choose(1);
    if (runtime && !domain) failed = make_domain(&domain);
    if (failed) domain = NULL;
    pthread_mutex_unlock(&lock);
    if (!runtime || failed) return failed; /* an older ONNX Runtime: graphs with these operators will not open */
    return ((Status (*)(void *, void *))runtime[ADD_DOMAIN])(options, domain);
}
