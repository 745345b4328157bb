#include "runtime_api.h"

#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "program.h"

Functions runtime;

#define CALL(place, result, ...) ((result (*)(__VA_ARGS__))runtime[place])

Status error_of(const char *message) {
    return CALL(CREATE_STATUS, Status, int, const char *)(INVALID_ARGUMENT, message);
}

static void ignore(Status status) {
    if (status) CALL(RELEASE_STATUS, void, Status)(status);
}

Status error_in(const char *node, Status failed) {
    char message[512];
    const char *reason = CALL(STATUS_MESSAGE, const char *, const void *)(failed);
    snprintf(message, sizeof message, "Name:'%s' %s", node, reason);
    ignore(failed);
    return error_of(message);
}

/* Where an attribute is, and its whole name, which may be written to `to`. */
typedef struct {
    const void *info;
    const char *name;
} Attribute;

static Attribute attribute_of(const void *info, const char *name, char *to, size_t size) {
    if (!is_ours(info)) return (Attribute){info, name};
    const Prefixed *prefixed = untagged(info);
    snprintf(to, size, "%s%s", prefixed->prefix, name);
    return (Attribute){prefixed->info, to};
}

int int_attribute(const void *info, const char *name, int missing) {
    int64_t value;
    char whole[64];
    Attribute at = attribute_of(info, name, whole, sizeof whole);
    Status status = CALL(INT_ATTRIBUTE, Status, const void *, const char *, int64_t *)(at.info, at.name, &value);
    ignore(status);
    return status ? missing : value > INT_MAX ? INT_MAX : value < INT_MIN ? INT_MIN : (int)value;
}

float float_attribute(const void *info, const char *name, float missing) {
    float value;
    char whole[64];
    Attribute at = attribute_of(info, name, whole, sizeof whole);
    Status status = CALL(FLOAT_ATTRIBUTE, Status, const void *, const char *, float *)(at.info, at.name, &value);
    ignore(status);
    return status ? missing : value;
}

void text_attribute(const void *info, const char *name, char *text, size_t size) {
    char whole[64];
    Attribute at = attribute_of(info, name, whole, sizeof whole);
    text[0] = 0;
    ignore(CALL(STRING_ATTRIBUTE, Status, const void *, const char *, char *, size_t *)(at.info, at.name, text, &size));
}

int is_attribute(const void *info, const char *name, const char *text) {
    char value[32];
    text_attribute(info, name, value, sizeof value);
    return !strcmp(value, text);
}

static int read_tensor(const void *value, Tensor *found) {
    void *shape;
    ignore(CALL(TENSOR_SHAPE, Status, const void *, void **)(value, &shape));
    ignore(CALL(DIMENSION_COUNT, Status, const void *, size_t *)(shape, &found->rank));
    int fits = found->rank <= sizeof found->dims / sizeof *found->dims;
    if (fits) ignore(CALL(DIMENSIONS, Status, const void *, int64_t *, size_t)(shape, found->dims, found->rank));
    CALL(RELEASE_SHAPE, void, void *)(shape);
    if (!fits) return 0;
    found->count = 1;
    for (size_t i = 0; i < found->rank; i++) found->count *= (size_t)found->dims[i];
    ignore(CALL(TENSOR_DATA, Status, const void *, void **)(value, &found->data));
    return 1;
}

static const void *input_value(void *context, size_t place) {
    size_t count = 0;
    const void *value = NULL;
    ignore(CALL(INPUT_COUNT, Status, const void *, size_t *)(context, &count));
    if (place < count) ignore(CALL(INPUT, Status, const void *, size_t, const void **)(context, place, &value));
    return value;
}

int input_of(void *context, size_t place, Tensor *found) {
    if (is_ours(context)) return framed_input(untagged(context), place, found);
    const void *value = input_value(context, place);
    return value && read_tensor(value, found);
}

float *floats_of(void *context, size_t place) { /* without its shape, which takes longest to read */
    if (is_ours(context)) {
        Tensor found;
        return framed_input(untagged(context), place, &found) ? found.data : NULL;
    }
    const void *value = input_value(context, place);
    void *data = NULL;
    if (value) ignore(CALL(TENSOR_DATA, Status, const void *, void **)(value, &data));
    return data;
}

int input_has(void *context, size_t place, size_t count) {
    Tensor found;
    if (is_ours(context)) return !framed_input(untagged(context), place, &found) || found.count == count;
    const void *value = input_value(context, place);
    return !value || (read_tensor(value, &found) && found.count == count);
}

void *output_of(void *context, size_t place, const int64_t *dims, size_t rank) {
    if (is_ours(context)) return framed_output(untagged(context), place, dims, rank);
    size_t count = 0;
    void *value = NULL, *data = NULL;
    ignore(CALL(OUTPUT_COUNT, Status, const void *, size_t *)(context, &count));
    if (place >= count) return NULL;
    ignore(CALL(OUTPUT, Status, void *, size_t, const int64_t *, size_t, void **)(context, place, dims, rank, &value));
    if (value) ignore(CALL(TENSOR_DATA, Status, const void *, void **)(value, &data));
    return data;
}

int has_places(void *context, size_t inputs, size_t outputs) {
    size_t given = 0, asked = 0;
    ignore(CALL(INPUT_COUNT, Status, const void *, size_t *)(context, &given));
    ignore(CALL(OUTPUT_COUNT, Status, const void *, size_t *)(context, &asked));
    return given == inputs && asked == outputs;
}

size_t rows_of(const Tensor *tensor) {
    size_t last = tensor->rank ? (size_t)tensor->dims[tensor->rank - 1] : 1;
    return last ? tensor->count / last : 0;
}

Status in_parallel(void *context, void (*body)(void *, size_t), size_t count, void *given) {
    if (is_ours(context))
        return run_in_team(((const Frame *)untagged(context))->team, body, count, given), NULL;
    if (count > 1)
        return CALL(PARALLEL_FOR, Status, const void *, void (*)(void *, size_t), size_t, size_t, void *)(
            context, body, count, count, given);
    if (count) body(given, 0);
    return NULL;
}

size_t threads_of(const void *context) {
    return is_ours(context) ? team_size(((const Frame *)untagged(context))->team) : 0;
}

typedef struct {
    void *memory[USES];
    size_t size[USES];
} Scratch;

static pthread_key_t of_thread;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static __thread Scratch *own;

static void release(void *given) {
    Scratch *all = given;
    for (int use = 0; use < USES; use++) free(all->memory[use]);
    free(all);
}

static void make_key(void) { pthread_key_create(&of_thread, release); }

void drop_scratch(enum ScratchUse first, enum ScratchUse last, size_t most) {
    for (int use = (int)first; own && use <= (int)last; use++)
        if (own->size[use] > most) {
            free(own->memory[use]);
            own->memory[use] = NULL, own->size[use] = 0;
        }
}

void *scratch(enum ScratchUse use, size_t bytes) {
    if (!own) {
        pthread_once(&once, make_key);
        own = calloc(1, sizeof *own);
        if (!own) abort();
        pthread_setspecific(of_thread, own);
    }
    if (own->size[use] < bytes) {
        free(own->memory[use]);
        own->size[use] = (bytes + bytes / 4 + 4095) / 4096 * 4096;
        own->memory[use] = aligned_alloc(64, own->size[use]);
        if (!own->memory[use]) abort(); /* as everything that runs out of memory here */
    }
    return own->memory[use];
}
