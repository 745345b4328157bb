/* Linear, LinearInt8: a product with constant weights, what is before it and what follows it.

       x [.., D] - (norm) - (smoothing) - (rounded to int8) - product with weights [D,N] - bias - activation - residual
   - norm */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "operators.h"

enum { X, WEIGHT, SCALE, BIAS, SMOOTHING, RESIDUAL, NORM_WEIGHT, NORM_BIAS, INPUT_NORM_WEIGHT, INPUT_NORM_BIAS };
enum {
    MOST_ROWS = 96,        /* of a block, which is multiplied at once */
    OWN_ROWS = 32,         /* least of a thread that reads all weights from memory: multiplying them takes longer */
    CACHED_ROWS = 8,       /* least of one that reads them from its own cache: meeting the others takes longer */
    USUAL_CACHE = 1 << 20, /* bytes, where a machine does not tell */
    MOST_WHOLE = 1 << 24,  /* multiplications of a block by a thread that meets no other meanwhile */
    NARROW = 4             /* panels of a part, about: the next ones of a part are read while it computes */
};

typedef struct {
    Weights weights;
    const float *constants[INPUT_NORM_BIAS + 1]; /* of all inputs that never move, but for the weight */
    Steps steps;
    enum Activation activation;
    int stored_int8, rounds, rms, input_rms;
    float epsilon, input_epsilon;
} Linear;

typedef struct {
    const Linear *op;
    const Packed *weights;
    const float *given, *x, *smoothing; /* x: given, or normalised */
    float *smoothed;
    Int8Rows rounded;
    uint8_t *steps;
    float *row_scale;
    Epilogue then;
    const float *norm_weight, *norm_bias, *input_norm_weight, *input_norm_bias;
    float *y, *normalised;
    size_t rows, depth, columns, panels, block /* rows */, row_blocks, column_parts;
} Call;

static size_t first_row(const Call *call, size_t block) {
    size_t row = block * call->block;
    return row < call->rows ? row : call->rows;
}

/* A block of rows as it is multiplied: normalised, smoothed, rounded. */
static void prepare_part(void *given, size_t block) {
    Call *call = given;
    size_t first = first_row(call, block), end = first_row(call, block + 1), depth = call->depth;
    if (call->normalised) {
        memcpy(call->normalised + first * depth, call->given + first * depth, (end - first) * depth * sizeof(float));
        kernels->normalise(call->normalised, first, end, depth, call->input_norm_weight, call->input_norm_bias,
                           call->op->input_epsilon, call->op->input_rms);
    }
    if (call->steps)
        kernels->round_rows(call->x, first, end, depth, call->smoothing, call->op->steps, call->steps, call->row_scale);
    for (size_t r = first; call->smoothed && r < end; r++)
        kernels->multiply(call->x + r * depth, call->smoothing, depth, call->smoothed + r * depth);
}

static void normalise_part(void *given, size_t block) {
    Call *call = given;
    kernels->normalise(call->y, first_row(call, block), first_row(call, block + 1), call->columns, call->norm_weight,
                       call->norm_bias, call->op->epsilon, call->op->rms);
}

static void multiply_part(void *given, size_t part) {
    Call *call = given;
    size_t block = part / call->column_parts, column_part = part % call->column_parts;
    size_t row = first_row(call, block), rows = first_row(call, block + 1) - row;
    size_t group = rows == 1 ? NARROW : rows <= 3 ? 2 : 1; /* panels that are multiplied together */
    size_t groups = (call->panels + group - 1) / group;
    size_t first = groups * column_part / call->column_parts * group;
    size_t end = groups * (column_part + 1) / call->column_parts * group;
    if (end > call->panels) end = call->panels;
    Epilogue then = call->then;
    if (then.residual) then.residual += row * call->columns;
    float *y = call->y + row * call->columns;
    if (call->rounded.steps) {
        Int8Rows x = call->rounded;
        x.steps += row * x.quads * 4;
        x.scale += row;
        kernels->int8_product(&x, rows, &call->weights->int8, first, end, &then, y);
    } else {
        const float *x = (call->smoothed ? call->smoothed : call->x) + row * call->depth;
        kernels->float_product(x, rows, call->depth, call->weights->floats, call->columns, first, end, &then, y);
    }
}

/* All that is done to a block of rows: threads that have their own meet once for each operator. */
static void whole_part(void *given, size_t block) {
    Call *call = given;
    prepare_part(call, block);
    multiply_part(call, block); /* all columns are one part */
    if (call->norm_weight) normalise_part(call, block);
}

static size_t own_cache(void) { /* bytes that a thread keeps from one call to the next */
    static long known;
    long bytes = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!bytes) {
        bytes = sysconf(_SC_LEVEL2_CACHE_SIZE);
        if (bytes <= 0) bytes = USUAL_CACHE;
        __atomic_store_n(&known, bytes, __ATOMIC_RELAXED);
    }
    return (size_t)bytes;
}

/* Rows of a block. Threads have blocks of their own where there are rows enough: what one of them writes is in its own
   cache when it reads that, in the next call. */
static size_t block_of(const Call *call, size_t threads, size_t weight_size) {
    size_t blocks = (call->rows + MOST_ROWS - 1) / MOST_ROWS;
    size_t own = weight_size * call->depth * call->columns <= own_cache() ? CACHED_ROWS : OWN_ROWS;
    if (threads > call->rows / own) threads = call->rows / own;
    if (threads > 1) blocks = (blocks + threads - 1) / threads * threads;
    return (call->rows + blocks - 1) / blocks;
}

/* Parts of the columns of a block of rows, so that each is work enough. */
static size_t parts_of(const void *context, const Call *call) {
    size_t parts = call->block * call->depth * call->columns / least_work(context);
    size_t most = (call->panels + NARROW - 1) / NARROW;
    if (call->row_blocks >= 4 && parts > 4) parts = 4;
    if (parts > 16) parts = 16;
    if (parts > most) parts = most;
    if (parts > 1) parts += parts % 2; /* as much for each of two threads */
    return parts ? parts : 1;
}

/* The first call packs them; later ones need not look at it nor at the other constants. NULL: they do not fit. */
static const Packed *packed_weights(Linear *op, void *context, enum PackedForm form) {
    const Packed *packed = __atomic_load_n(&op->weights.packed, __ATOMIC_ACQUIRE);
    Tensor weight;
    if (packed || !input_of(context, WEIGHT, &weight) || weight.rank != 2) return packed;
    size_t depth = (size_t)weight.dims[0], columns = (size_t)weight.dims[1];
    if (op->stored_int8 && !floats_of(context, SCALE)) return NULL;
    for (size_t place = SCALE; place <= INPUT_NORM_BIAS; place++) {
        int of_inputs = place == SMOOTHING || place == INPUT_NORM_WEIGHT || place == INPUT_NORM_BIAS;
        if (place != RESIDUAL && !input_has(context, place, of_inputs ? depth : columns)) return NULL;
    }
    for (size_t place = SCALE; place <= INPUT_NORM_BIAS; place++)
        if (place != RESIDUAL) op->constants[place] = floats_of(context, place); /* before the weights are seen */
    return weights_of(&op->weights, &weight, op->constants[SCALE], 0, form);
}

static Status compute(void *kernel, void *context) {
    Linear *op = kernel;
    Tensor x;
    enum PackedForm form = op->stored_int8 ? INT8_PANELS : op->rounds ? ROUNDED_PANELS : FLOAT_PANELS;
    const Packed *weights = packed_weights(op, context, form);
    if (!input_of(context, X, &x) || !weights || x.rank < 1 || x.dims[x.rank - 1] != (int64_t)weights->depth)
        return error_of("Linear: x [.., D], weight [D, N] and the other inputs do not fit");
    Call call = {.op = op,
                 .weights = weights,
                 .given = x.data,
                 .x = x.data,
                 .rows = rows_of(&x),
                 .depth = weights->depth,
                 .columns = weights->columns};
    x.dims[x.rank - 1] = (int64_t)call.columns;
    call.y = output_of(context, 0, x.dims, x.rank);
    if (!call.rows || !call.columns) return NULL;
    Tensor residual = {0};
    if (input_of(context, RESIDUAL, &residual) && residual.count != call.rows * call.columns)
        return error_of("Linear: its residual has another shape");
    call.then = (Epilogue){op->constants[BIAS], residual.data, op->activation};
    call.smoothing = op->constants[SMOOTHING];
    call.norm_weight = op->constants[NORM_WEIGHT];
    call.norm_bias = op->constants[NORM_BIAS];
    call.panels = (call.columns + PANEL - 1) / PANEL;
    size_t threads = threads_of(context);
    call.block = block_of(&call, threads, form == FLOAT_PANELS ? sizeof(float) : 1);
    call.row_blocks = (call.rows + call.block - 1) / call.block;
    call.column_parts = parts_of(context, &call);
    call.input_norm_weight = op->constants[INPUT_NORM_WEIGHT];
    call.input_norm_bias = op->constants[INPUT_NORM_BIAS];
    if (call.input_norm_weight) {
        call.normalised = scratch(NORMALISED, call.rows * call.depth * sizeof(float));
        call.x = call.normalised;
    }
    if (form != FLOAT_PANELS) {
        size_t quads = (call.depth + 3) / 4;
        call.steps = scratch(ROUNDED, call.rows * quads * 4);
        call.row_scale = scratch(ROW_SCALES, call.rows * sizeof(float));
        call.rounded = (Int8Rows){call.steps, call.row_scale, quads, op->steps.zero, 1.0f / (float)op->steps.above};
    } else if (call.smoothing) {
        call.smoothed = scratch(SMOOTHED, call.rows * call.depth * sizeof(float));
    }
    int one_each = threads && call.row_blocks > 1 && call.row_blocks >= threads;
    if (one_each && call.block * call.depth * call.columns <= MOST_WHOLE) {
        call.column_parts = 1;
        return in_parallel(context, whole_part, call.row_blocks, &call);
    }
    Status failed = NULL;
    if (call.normalised || call.steps || call.smoothed)
        failed = in_parallel(context, prepare_part, call.row_blocks, &call);
    if (!failed) failed = in_parallel(context, multiply_part, call.row_blocks * call.column_parts, &call);
    if (!failed && call.norm_weight) failed = in_parallel(context, normalise_part, call.row_blocks, &call);
    return failed;
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    (void)functions;
    Linear *op = calloc(1, sizeof *op);
    if (!op) return error_of("out of memory");
    op->stored_int8 = operator == &linear_int8;
    op->rounds = int_attribute(info, "quantised", 0);
    if (is_attribute(info, "activation", "relu")) op->activation = RELU;
    if (is_attribute(info, "activation", "gelu")) op->activation = GELU;
    if (is_attribute(info, "activation", "silu")) op->activation = SILU;
    op->epsilon = float_attribute(info, "epsilon", 1e-5f);
    op->rms = int_attribute(info, "rms", 0);
    op->input_epsilon = float_attribute(info, "input_epsilon", 1e-5f);
    op->input_rms = int_attribute(info, "input_rms", 0);
    op->steps = steps_of(info);
    *kernel = op;
    return NULL;
}

static void destroy(void *kernel) {
    give_back(((Linear *)kernel)->weights.packed);
    free(kernel);
}

Operator linear = {.called = "Linear",
                   .inputs = "ffFFFFFFFF",
                   .outputs = "f",
                   .create_or_fail = create,
                   .compute_or_fail = compute,
                   .destroy = destroy};
Operator linear_int8 = {.called = "LinearInt8",
                        .inputs = "fcFFFFFFFF",
                        .outputs = "f",
                        .create_or_fail = create,
                        .compute_or_fail = compute,
                        .destroy = destroy};
