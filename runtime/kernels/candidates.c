/* Candidates, CandidatesInt8: the product with the output table, the best tokens of every row and the sum of its
   softmax.

   Logits are made a block of tokens at a time, ranked while they are in the cache, and stored only where they are asked
   for. A screened table in float is multiplied in int8 first: the error of that is bounded, so only the few tokens that
   can be among the best are multiplied exactly. Parts do not depend on threads or rows, so neither do sums. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "operators.h"

enum { X, TABLE, SCALE, BIAS, WANTED, SMOOTHING };
enum { CHUNK = 1024, BLOCK = 256 }; /* tokens of a part, and of a tile of it */
enum { MOST_SCREENED = 16, SCREENED_ROWS = 32 /* rows whose rough logits are kept at a time */ };
static const float ULP = 0x1p-24f;

typedef struct {
    Weights weights, screening;
    Steps steps;
    int stored_int8, by_rows, screened;
    float *wide; /* [V], of screening: what the rounding of a bias can change */
} Candidates;

typedef struct {
    Candidates *op;
    const Packed *weights;
    const float *x, *table, *bias;
    Int8Rows rounded;
    float *logits; /* [M,V] or NULL */
    size_t rows, depth, vocab, chunks;
    int wanted, summed;
    Ranking *rankings; /* [chunks, M] */
    float *best;       /* [chunks, M, wanted] */
    int64_t *tokens;   /* the same */
    float *floors;     /* [M], that a logit must reach to be among the best: so many are as large in a chunk before */
    float *rough;      /* [M,V], of screening */
    float *out_logits, *out_best, *out_sum;
    int64_t *out_tokens;
} Call;

/* Logits of tokens first..end for all rows, without bias -> y [M, stride]. */
static void products(const Call *call, size_t first, size_t end, float *y, size_t stride) {
    const Packed *weights = call->weights;
    size_t panel = first / PANEL, last = (end + PANEL - 1) / PANEL;
    if (call->rounded.steps)
        kernels->int8_panels(&call->rounded, call->rows, &weights->int8, panel, last, y, stride);
    else
        kernels->float_panels(call->x, call->rows, call->depth, weights->floats, call->vocab, panel, last, y, stride);
}

/* Ranks some logits of a row among those of its chunk. Threads read and raise a row's floor as it comes: whichever they
   find, what is left out is not among the best, so the result is the same. */
static void rank_row(const Call *call, size_t chunk, size_t row, float *logits, size_t first, size_t count) {
    size_t place = chunk * call->rows + row, wanted = (size_t)call->wanted;
    float floor, *best = call->best + place * wanted;
    __atomic_load(&call->floors[row], &floor, __ATOMIC_RELAXED);
    kernels->rank(logits, call->bias ? call->bias + first : NULL, first, count, call->wanted, call->summed, floor,
                  &call->rankings[place], best, call->tokens + place * wanted);
    if (call->rankings[place].count == call->wanted && best[wanted - 1] > floor)
        __atomic_store(&call->floors[row], &best[wanted - 1], __ATOMIC_RELAXED);
}

static void rank_chunk(void *given, size_t chunk) {
    Call *call = given;
    size_t end = (chunk + 1) * CHUNK < call->vocab ? (chunk + 1) * CHUNK : call->vocab;
    float *tile = call->logits ? NULL : scratch(TILE, call->rows * BLOCK * sizeof(float));
    size_t stride = call->logits ? call->vocab : BLOCK;
    for (size_t r = 0; r < call->rows; r++) call->rankings[chunk * call->rows + r] = (Ranking){.largest = -INFINITY};
    for (size_t first = chunk * CHUNK; first < end; first += BLOCK) {
        size_t count = end - first < BLOCK ? end - first : BLOCK;
        float *y = call->logits ? call->logits + first : tile;
        products(call, first, first + count, y, stride);
        for (size_t r = 0; r < call->rows; r++) rank_row(call, chunk, r, y + r * stride, first, count);
    }
}

/* Not a number where a logit is none or infinite. Where nothing is above -inf, neither is the sum of e^x a number. */
static float sum_of(const Call *call, size_t row, const float *best) {
    double sum = 0;
    if (best[0] == -INFINITY) return NAN;
    for (size_t chunk = 0; chunk < call->chunks; chunk++) {
        const Ranking *one = &call->rankings[chunk * call->rows + row];
        if (one->bad) return NAN;
        if (call->summed && one->sum > 0) sum += (double)one->sum * exp((double)one->largest - best[0]);
    }
    for (int i = 0; !call->summed && i < call->wanted; i++) sum += exp((double)best[i] - best[0]);
    return (float)sum;
}

/* A row's best tokens of all chunks -> how many there are. */
static int merged(const Call *call, size_t row, float *best, int64_t *tokens) {
    size_t wanted = (size_t)call->wanted;
    int count = 0;
    for (size_t chunk = 0; chunk < call->chunks; chunk++) { /* lower tokens first: of equal ones they stay in front */
        size_t place = chunk * call->rows + row;
        for (int i = 0; i < call->rankings[place].count; i++)
            place_best(call->best[place * wanted + (size_t)i], call->tokens[place * wanted + (size_t)i], -INFINITY,
                       call->wanted, &count, best, tokens);
    }
    return count;
}

static void merge_row(void *given, size_t row) {
    Call *call = given;
    size_t wanted = (size_t)call->wanted;
    float *best = call->out_best + row * wanted;
    int64_t *tokens = call->out_tokens + row * wanted;
    for (size_t i = (size_t)merged(call, row, best, tokens); i < wanted; i++) best[i] = -INFINITY, tokens[i] = 0;
    call->out_sum[row] = sum_of(call, row, best);
    if (call->out_logits) memcpy(call->out_logits + row * wanted, best, wanted * sizeof(float));
}

static void exact_logits(const Call *call, size_t row, const int64_t *tokens, size_t count, float *logits) {
    kernels->gathered_products(call->x + row * call->depth, call->depth, call->table, tokens, count, logits);
    for (size_t i = 0; call->bias && i < count; i++) logits[i] += call->bias[tokens[i]];
}

/* Rough logits of one chunk, and which are the best of them. */
static void screen_chunk(void *given, size_t chunk) {
    Call *call = given;
    size_t first = chunk * CHUNK, count = first + CHUNK < call->vocab ? CHUNK : call->vocab - first;
    products(call, first, first + count, call->rough + first, call->vocab);
    for (size_t r = 0; r < call->rows; r++) {
        call->rankings[chunk * call->rows + r] = (Ranking){.largest = -INFINITY};
        rank_row(call, chunk, r, call->rough + r * call->vocab + first, first, count);
    }
}

/* The bounds |x w - v q| <= |v| |w - q| + |x - v| |w|, where v and q are x and w in int8; to the latter comes what sums
   of D products in fp32 can err: the rough one and two exact ones. */
static Bounds bounds_of(const Call *call, size_t row) {
    double length = 0, missed = 0, step = (double)call->rounded.step * call->rounded.scale[row];
    const uint8_t *steps = call->rounded.steps + row * call->rounded.quads * 4;
    for (size_t d = 0; d < call->depth; d++) {
        double v = step * ((int)steps[d] - call->rounded.zero), error = (double)call->x[row * call->depth + d] - v;
        length += v * v;
        missed += error * error;
    }
    float of_weights = (float)(sqrt(length) * (1 + 1e-6));
    float of_rows = (float)(sqrt(missed) * (1 + 1e-6)) + 4.0f * (float)(call->depth + 4) * ULP * of_weights;
    return (Bounds){of_weights, of_rows, call->weights->wrong, call->weights->norms, call->op->wide};
}

/* The tokens of a row whose logit can be t or more, and the others behind them; all where the row is not finite. */
static size_t tokens_in_question(const Call *call, size_t row, float t, int64_t *found) {
    size_t count = 0;
    Bounds bounds = bounds_of(call, row);
    if (isfinite(call->rounded.scale[row])) {
        count = kernels->reaching_tokens(call->rough + row * call->vocab, call->vocab, &bounds, t, found);
    } else {
        for (; count < call->vocab; count++) found[count] = (int64_t)count;
    }
    return count;
}

/* A row's best tokens by their exact logits. None of them has a lower one than the least of the tokens that are roughly
   best, so the others need not be multiplied again. */
static void settle_row(void *given, size_t row) {
    Call *call = given;
    size_t wanted = (size_t)call->wanted, n;
    float t[MOST_SCREENED], *best = call->out_best + row * wanted, *logits = scratch(TILE, call->vocab * sizeof(float));
    int64_t *asked = scratch(SLOTS, call->vocab * sizeof(int64_t)), *tokens = call->out_tokens + row * wanted;
    int count = 0, found = merged(call, row, best, tokens);
    exact_logits(call, row, tokens, (size_t)found, t);
    float least = found < call->wanted ? -INFINITY : t[0];
    for (int i = 0; i < found; i++) least = t[i] < least ? t[i] : least;
    n = tokens_in_question(call, row, least, asked);
    exact_logits(call, row, asked, n, logits);
    for (size_t i = 0; i < n; i++) place_best(logits[i], asked[i], -INFINITY, call->wanted, &count, best, tokens);
    double sum = 0;
    for (int i = 0; i < count; i++) sum += exp((double)best[i] - best[0]);
    for (; count < call->wanted; count++) best[count] = -INFINITY, tokens[count] = 0;
    int bad = !isfinite(call->rounded.scale[row]);
    for (size_t chunk = 0; chunk < call->chunks; chunk++) bad |= call->rankings[chunk * call->rows + row].bad;
    call->out_sum[row] = bad || best[0] == -INFINITY ? NAN : (float)sum;
    memcpy(call->out_logits + row * wanted, best, wanted * sizeof(float));
}

static void reserve_ranks(Call *call) {
    size_t pairs = call->chunks * call->rows, wanted = (size_t)call->wanted;
    call->rankings = scratch(RANKINGS, pairs * sizeof(Ranking));
    call->best = scratch(BEST, pairs * wanted * sizeof(float));
    call->tokens = scratch(FOUND, pairs * wanted * sizeof(int64_t));
    call->floors = scratch(FLOORS, call->rows * sizeof(float));
    for (size_t r = 0; r < call->rows; r++) call->floors[r] = -INFINITY;
}

static Status screened(const Call *whole, void *context) {
    for (size_t first = 0; first < whole->rows; first += SCREENED_ROWS) {
        Call part = *whole;
        part.rows = whole->rows - first < SCREENED_ROWS ? whole->rows - first : SCREENED_ROWS;
        part.x += first * part.depth;
        part.rounded.steps += first * part.rounded.quads * 4;
        part.rounded.scale += first;
        part.out_logits += first * (size_t)part.wanted, part.out_best += first * (size_t)part.wanted;
        part.out_tokens += first * (size_t)part.wanted, part.out_sum += first;
        part.rough = scratch(ROUGH, part.rows * part.vocab * sizeof(float));
        reserve_ranks(&part);
        Status failed = in_parallel(context, screen_chunk, part.chunks, &part);
        if (!failed) failed = in_parallel(context, settle_row, part.rows, &part);
        if (failed) return failed;
    }
    return NULL;
}

static Status ranked(Call *call, void *context) {
    reserve_ranks(call);
    Status failed = in_parallel(context, rank_chunk, call->chunks, call);
    return failed ? failed : in_parallel(context, merge_row, call->rows, call);
}

static void round_all(Call *call, Steps steps, const float *smoothing) {
    size_t quads = (call->depth + 3) / 4;
    uint8_t *bytes = scratch(ROUNDED, call->rows * quads * 4);
    float *scale = scratch(ROW_SCALES, call->rows * sizeof(float));
    kernels->round_rows(call->x, 0, call->rows, call->depth, smoothing, steps, bytes, scale);
    call->rounded = (Int8Rows){bytes, scale, quads, steps.zero, 1.0f / (float)steps.above};
}

static void widen(Candidates *op, const float *bias, size_t vocab) {
    float *wide = bias ? malloc(vocab * sizeof(float)) : NULL;
    if (bias && !wide) abort();
    for (size_t i = 0; bias && i < vocab; i++) wide[i] = isfinite(bias[i]) ? 12 * ULP * fabsf(bias[i]) : 0;
    float *none = NULL;
    if (!__atomic_compare_exchange_n(&op->wide, &none, wide, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        free(wide); /* another thread was first */
}

static Status compute(void *kernel, void *context) {
    Candidates *op = kernel;
    Tensor x, table, wanted;
    if (!input_of(context, X, &x) || !input_of(context, TABLE, &table) || !input_of(context, WANTED, &wanted) ||
        x.rank != 3 || table.rank != 2 || wanted.count != 1 || x.dims[2] != table.dims[op->by_rows ? 1 : 0])
        return error_of("Candidates: x [B,K,D], the table and wanted [1] do not fit");
    int64_t asked = *(int64_t *)wanted.data;
    Call call = {.op = op,
                 .x = x.data,
                 .table = table.data,
                 .bias = floats_of(context, BIAS),
                 .rows = rows_of(&x),
                 .depth = (size_t)x.dims[2],
                 .vocab = (size_t)table.dims[op->by_rows ? 0 : 1]};
    int64_t vocab = (int64_t)call.vocab;
    if (asked > vocab || asked < -vocab) return error_of("Candidates: more tokens are wanted than there are");
    int64_t count = asked ? (asked < 0 ? -asked : asked) : x.dims[1] < vocab ? x.dims[1] + 1 : vocab;
    int64_t all[] = {x.dims[0], x.dims[1], asked ? count : (int64_t)call.vocab}, few[] = {x.dims[0], x.dims[1], count};
    float *logits = output_of(context, 0, all, 3);
    call.out_sum = output_of(context, 1, x.dims, 2);
    call.out_best = output_of(context, 2, few, 3);
    call.out_tokens = output_of(context, 3, few, 3);
    if (!call.rows) return NULL; /* empty outputs have no memory */
    if (!logits || !call.out_sum || !call.out_best || !call.out_tokens)
        return error_of("Candidates: an output is missing");
    call.wanted = (int)count, call.summed = asked <= 0;
    call.logits = asked ? NULL : logits, call.out_logits = asked ? logits : NULL;
    call.chunks = (call.vocab + CHUNK - 1) / CHUNK;
    const float *smoothing = floats_of(context, SMOOTHING);
    if (!input_has(context, BIAS, call.vocab) || !input_has(context, SCALE, call.vocab) ||
        !input_has(context, SMOOTHING, call.depth) || (op->stored_int8 && !floats_of(context, SCALE)))
        return error_of("Candidates: scale, bias and smoothing do not fit the table");
    if (op->stored_int8) {
        call.weights = weights_of(&op->weights, &table, floats_of(context, SCALE), op->by_rows, INT8_PANELS);
        round_all(&call, op->steps, smoothing);
        return ranked(&call, context);
    }
    if (smoothing) {
        float *smoothed = scratch(SMOOTHED, call.rows * call.depth * sizeof(float));
        for (size_t r = 0; r < call.rows; r++)
            kernels->multiply(call.x + r * call.depth, smoothing, call.depth, smoothed + r * call.depth);
        call.x = smoothed;
    }
    if (op->screened && asked > 0 && asked <= MOST_SCREENED) {
        call.weights = weights_of(&op->screening, &table, NULL, op->by_rows, SCREENING);
        if (call.weights->finite) {
            if (call.bias && !__atomic_load_n(&op->wide, __ATOMIC_ACQUIRE)) widen(op, call.bias, call.vocab);
            round_all(&call, (Steps){127, 128, 1, 0.0f}, NULL);
            return screened(&call, context);
        }
    }
    call.weights = weights_of(&op->weights, &table, NULL, op->by_rows, FLOAT_PANELS);
    return ranked(&call, context);
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    (void)functions;
    Candidates *op = calloc(1, sizeof *op);
    if (!op) return error_of("out of memory");
    op->stored_int8 = operator == &candidates_int8;
    op->by_rows = int_attribute(info, "by_rows", 0);
    op->screened = int_attribute(info, "screened", 0) && op->by_rows;
    op->steps = steps_of(info);
    *kernel = op;
    return NULL;
}

static void destroy(void *kernel) {
    Candidates *op = kernel;
    give_back(op->weights.packed);
    give_back(op->screening.packed);
    free(op->wide);
    free(op);
}

Operator candidates = {.called = "Candidates",
                       .inputs = "ffFFiF",
                       .outputs = "fffi",
                       .create_or_fail = create,
                       .compute_or_fail = compute,
                       .destroy = destroy};
Operator candidates_int8 = {.called = "CandidatesInt8",
                            .inputs = "fcFFiF",
                            .outputs = "fffi",
                            .create_or_fail = create,
                            .compute_or_fail = compute,
                            .destroy = destroy};
