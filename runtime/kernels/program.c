/* StepProgram, EncoderProgram: a whole graph of our operators as one operator.

   Between two nodes of a graph ONNX Runtime takes about a microsecond, and sharing a node among threads takes several.
   A small model's nodes take less than that. Here a node is a call of a function, and the threads stay together for the
   whole graph.

   Attributes: `nodes`, and of node i `i.operator`, `i.inputs` and `i.outputs` (numbers of values, -1: absent) and its
   own, as `i.NAME`. Values are numbered: inputs, outputs, what is made on the way. The first `variables` inputs are
   given anew in every call, the others are constants. `buffers`: for every value made, the number of its memory. */
#include "program.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "chain.h"
#include "operators.h"

enum { MOST_LETTERS = 128, MOST_VALUES = 1 << 16 };
enum { MOST_KEPT = 4 << 20 /* bytes of a tensor between nodes that stay from one call to the next */ };

typedef struct {
    const Operator *op;
    void *kernel;
    Wires wires;
    char name[MOST_LETTERS];
} Node;

typedef struct {
    size_t nodes, variables, inputs, outputs, made;
    Node *node;
    int *buffers;
    Tensor *constants; /* in place of inputs; read by the first call, as they never move */
    int known;
    pthread_mutex_t reading;
    Chain chain;
} Program;

typedef struct {
    const Program *program;
    Frame frame;
    Status failed;
} Call;

int framed_input(const Frame *frame, size_t place, Tensor *found) {
    int value = place < MOST_INPUTS ? frame->wires->inputs[place] : NO_VALUE;
    if (value == NO_VALUE || (!frame->values[value].data && !frame->values[value].rank)) return 0;
    *found = frame->values[value];
    return 1;
}

void *framed_output(Frame *frame, size_t place, const int64_t *dims, size_t rank) {
    int value = place < MOST_OUTPUTS ? frame->wires->outputs[place] : NO_VALUE;
    if (value == NO_VALUE) return NULL;
    Tensor *made = &frame->values[value];
    made->rank = rank, made->count = 1;
    for (size_t i = 0; i < rank; i++) made->dims[i] = dims[i], made->count *= (size_t)dims[i];
    size_t size = made->count * 8 + 1; /* of any type */
    if (value < frame->first_output + frame->kept_outputs)
        made->data = scratch(KEPT_OUTPUTS + value - frame->first_output, size);
    else if (value < frame->first_made)
        made->data = output_of(frame->context, (size_t)(value - frame->first_output), dims, rank);
    else /* only floats are made on the way */
        made->data = scratch(BUFFERS + frame->buffers[value - frame->first_made], made->count * sizeof(float) + 1);
    return made->data;
}

static Status run_nodes(void *given) {
    Call *call = given;
    for (size_t i = 0; i < call->program->nodes; i++) {
        const Node *node = &call->program->node[i];
        call->frame.wires = &node->wires;
        Status failed = node->op->compute_or_fail(node->kernel, tagged(&call->frame));
        if (failed) return error_in(node->name, failed);
    }
    return NULL;
}

static int read_constants(Program *program, void *context) {
    if (__atomic_load_n(&program->known, __ATOMIC_ACQUIRE)) return 1;
    int found = 1;
    pthread_mutex_lock(&program->reading);
    for (size_t i = program->variables; i < program->inputs; i++)
        found &= input_of(context, i, &program->constants[i - program->variables]);
    __atomic_store_n(&program->known, found, __ATOMIC_RELEASE);
    pthread_mutex_unlock(&program->reading);
    return found;
}

/* Runs the program by the thread whose memory it uses. What a large batch needs between nodes is given back: another
   thread may lead the next time. */
static void lead(void *given, Team *team) {
    Call *call = given;
    const Chain *chain = &call->program->chain;
    call->frame.team = team;
    int greedy = chained_steps(chain, call->frame.values) > 0, beams = beam_steps(chain, call->frame.values) > 0;
    if (greedy || beams) call->frame.kept_outputs = LAST_KEPT_OUTPUT - KEPT_OUTPUTS + 1;
    if (greedy)
        call->failed = run_greedy(chain, &call->frame, run_nodes, call);
    else if (beams)
        call->failed = run_beams(chain, &call->frame, run_nodes, call);
    else
        call->failed = run_nodes(call);
    drop_scratch(BUFFERS, LAST_BUFFER, MOST_KEPT);
}

static Status compute(void *kernel, void *context) {
    Program *program = kernel;
    size_t count = program->inputs + program->outputs + program->made;
    Tensor *values = scratch(VALUES, count * sizeof(Tensor));
    if (!has_places(context, program->inputs, program->outputs))
        return error_of("Program: an input or an output is missing");
    if (!read_constants(program, context)) return error_of("Program: a constant is missing");
    memset(values + program->inputs, 0, (count - program->inputs) * sizeof(Tensor));
    for (size_t i = 0; i < program->variables; i++)
        if (!input_of(context, i, &values[i])) return error_of("Program: an input is missing");
    memcpy(values + program->variables, program->constants, (program->inputs - program->variables) * sizeof(Tensor));
    Call call = {.program = program,
                 .frame = {.values = values,
                           .first_output = (int)program->inputs,
                           .first_made = (int)(program->inputs + program->outputs),
                           .buffers = program->buffers,
                           .context = context}};
    run_together(context, lead, &call);
    return call.failed;
}

/* "3 -1 7" -> places of the list; what is not in it is absent. 0: the list is no such text. */
static int read_places(const char *text, int *places, size_t most, int below) {
    for (size_t i = 0; i < most; i++) places[i] = NO_VALUE;
    for (size_t i = 0; *text; i++) {
        char *end;
        long place = strtol(text, &end, 10);
        if (end == text || i == most || place < NO_VALUE || place >= below) return 0;
        places[i] = (int)place;
        text = end + (*end == ' ');
    }
    return 1;
}

static const Operator *operator_named(const char *name) {
    const Operator *known[] = {&linear,     &linear_int8,     &self_attention, &cross_attention, &encoder_attention,
                               &candidates, &candidates_int8, &embedding,      &embedding_int8,  &source_heads};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (!strcmp(known[i]->called, name)) return known[i];
    return NULL;
}

/* Whether a place is that of an input that is given anew in every call, or else that of an output. */
static int is_input(const Program *program, int place) { return place >= 0 && place < (int)program->variables; }
static int is_output(const Program *program, int place) {
    return place >= (int)program->inputs && place < (int)(program->inputs + program->outputs);
}

/* Where a plan and what it moves are among the values, and the caches: places of an input and of its output. */
static int find_chain(const Program *program, const void *info, Chain *chain) {
    enum { GIVEN = 14 }; /* the first are inputs, the others outputs */
    struct {
        const char *name;
        int *place;
    } known[] = {{"chain.tokens", &chain->tokens},
                 {"chain.position", &chain->position},
                 {"chain.write_index", &chain->write_index},
                 {"chain.self_mask", &chain->self_mask},
                 {"chain.steps", &chain->steps},
                 {"chain.target", &chain->target},
                 {"chain.limit", &chain->limit},
                 {"chain.banned", &chain->banned},
                 {"chain.end", &chain->end},
                 {"chain.beam_steps", &chain->beam_steps},
                 {"chain.beam_rules", &chain->beam_rules},
                 {"chain.beam_norms", &chain->beam_norms},
                 {"chain.beam_state", &chain->beam_state},
                 {"chain.beam_scores", &chain->beam_scores},
                 {"chain.exp_sum", &chain->exp_sum},
                 {"chain.best_logits", &chain->best_logits},
                 {"chain.best_tokens", &chain->best_tokens},
                 {"chain.chosen", &chain->chosen},
                 {"chain.top_logits", &chain->top_logits},
                 {"chain.chosen_logits", &chain->chosen_logits},
                 {"chain.exp_sums", &chain->exp_sums},
                 {"chain.ran", &chain->ran},
                 {"chain.beam_choices", &chain->beam_choices},
                 {"chain.beam_log_probs", &chain->beam_log_probs},
                 {"chain.new_state", &chain->new_state},
                 {"chain.new_scores", &chain->new_scores},
                 {"chain.new_mask", &chain->new_mask},
                 {"chain.beam_runs", &chain->beam_runs}};
    int values = (int)(program->inputs + program->outputs), places[2 * MOST_CACHES];
    char text[16 * MOST_CACHES];
    chain->first_output = (int)program->inputs;
    for (size_t i = 0; i < sizeof known / sizeof *known; i++) {
        *known[i].place = int_attribute(info, known[i].name, NO_VALUE);
        if (*known[i].place == NO_VALUE) return chain->steps = NO_VALUE, 1;
        if (!(i < GIVEN ? is_input : is_output)(program, *known[i].place)) return 0;
    }
    text_attribute(info, "chain.caches", text, sizeof text);
    if (!read_places(text, places, 2 * MOST_CACHES, values)) return 0;
    for (; chain->caches < MOST_CACHES && places[2 * chain->caches] != NO_VALUE; chain->caches++) {
        Cache cache = {places[2 * chain->caches], places[2 * chain->caches + 1]};
        if (!is_input(program, cache.input) || !is_output(program, cache.output)) return 0;
        chain->cache[chain->caches] = cache;
    }
    return 1;
}

/* Whether a node has all that its operator needs, and writes to no input. */
static int fits_operator(const Program *program, const Wires *wires, const Operator *op) {
    for (size_t i = 0; op->inputs[i]; i++) /* lower case: required */
        if (op->inputs[i] & 32 && wires->inputs[i] == NO_VALUE) return 0;
    for (size_t i = 0; op->outputs[i]; i++)
        if (op->outputs[i] & 32 && wires->outputs[i] == NO_VALUE) return 0;
    for (size_t i = 0; i < MOST_OUTPUTS; i++)
        if (wires->outputs[i] != NO_VALUE && wires->outputs[i] < (int)program->inputs) return 0;
    return 1;
}

static Status make_node(const Program *program, Functions functions, const void *info, size_t number, Node *node) {
    char prefix[16], text[MOST_LETTERS];
    int values = (int)(program->inputs + program->outputs + program->made);
    snprintf(prefix, sizeof prefix, "%zu.", number);
    Prefixed own = {info, prefix};
    text_attribute(tagged(&own), "inputs", text, sizeof text);
    int fits = read_places(text, node->wires.inputs, MOST_INPUTS, values);
    text_attribute(tagged(&own), "outputs", text, sizeof text);
    fits = fits && read_places(text, node->wires.outputs, MOST_OUTPUTS, values);
    text_attribute(tagged(&own), "name", node->name, sizeof node->name);
    text_attribute(tagged(&own), "operator", text, sizeof text);
    const Operator *op = operator_named(text);
    if (!fits || !op || !fits_operator(program, &node->wires, op))
        return error_of("Program: a node has an unknown operator or value");
    Status failed = op->create_or_fail(op, functions, tagged(&own), &node->kernel);
    if (!failed) node->op = op;
    return failed;
}

/* Whether the nodes write every output that is always there: a letter of the operator's in lower case. */
static int writes_outputs(const Program *program, const char *letters) {
    for (size_t place = 0; place < program->outputs; place++) {
        int written = !(*letters & 32), value = (int)(program->inputs + place);
        for (size_t i = 0; i < program->nodes * MOST_OUTPUTS; i++)
            written |= program->node[i / MOST_OUTPUTS].wires.outputs[i % MOST_OUTPUTS] == value;
        if (!written) return 0;
        letters += letters[1] && letters[1] != '*';
    }
    return 1;
}

static void destroy(void *kernel) {
    Program *program = kernel;
    for (size_t i = 0; program->node && i < program->nodes; i++)
        if (program->node[i].op) program->node[i].op->destroy(program->node[i].kernel);
    pthread_mutex_destroy(&program->reading);
    free(program->node);
    free(program->buffers);
    free(program->constants);
    free(program);
}

static Status fill(Program *program, const Operator *operator, Functions functions, const void *info) {
    if (!program->node || !program->buffers || !program->constants) return error_of("out of memory");
    char *text = calloc(1, program->made * 3 + 2);
    if (!text) return error_of("out of memory");
    text_attribute(info, "buffers", text, program->made * 3 + 2);
    int fits = read_places(text, program->buffers, program->made, LAST_BUFFER - BUFFERS + 1);
    for (size_t i = 0; i < program->made; i++) fits &= program->buffers[i] != NO_VALUE;
    free(text);
    if (!fits || !find_chain(program, info, &program->chain))
        return error_of("Program: buffers or the chain are not numbers of its memory and values");
    for (size_t i = 0; i < program->nodes; i++) {
        Status failed = make_node(program, functions, info, i, &program->node[i]);
        if (failed) return failed;
    }
    return writes_outputs(program, operator->outputs) ? NULL : error_of("Program: no node writes an output");
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    const char *names[] = {"nodes", "variables", "constants", "outputs", "made"};
    int counts[5];
    for (size_t i = 0; i < 5; i++) {
        counts[i] = int_attribute(info, names[i], 0);
        if (counts[i] < 0 || counts[i] > MOST_VALUES) return error_of("Program: a number of nodes or values is none");
    }
    Program *program = calloc(1, sizeof *program);
    if (!program) return error_of("out of memory");
    pthread_mutex_init(&program->reading, NULL);
    program->nodes = (size_t)counts[0];
    program->variables = (size_t)counts[1];
    program->inputs = program->variables + (size_t)counts[2];
    program->outputs = (size_t)counts[3];
    program->made = (size_t)counts[4];
    program->node = calloc(program->nodes + 1, sizeof *program->node);
    program->buffers = calloc(program->made + 1, sizeof *program->buffers);
    program->constants = calloc(program->inputs + 1, sizeof *program->constants);
    Status failed = fill(program, operator, functions, info);
    if (failed)
        destroy(program);
    else
        *kernel = program;
    return failed;
}

Operator step_program = {.called = "StepProgram",
                         .inputs = "*",
                         .outputs = "fffiIFFFIIDIDBIf*",
                         .create_or_fail = create,
                         .compute_or_fail = compute,
                         .destroy = destroy};
Operator encoder_program = {.called = "EncoderProgram",
                            .inputs = "*",
                            .outputs = "f*",
                            .create_or_fail = create,
                            .compute_or_fail = compute,
                            .destroy = destroy};
