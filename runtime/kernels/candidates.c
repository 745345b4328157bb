/* Candidates, CandidatesInt8: the product with the output table, the best tokens of every row and the sum of its
   softmax.

   Logits are made a block of tokens at a time, ranked while they are in the cache, and stored only where they are
   asked for. A screened table in float is multiplied roughly first: in int8, or in 16 bits where sums are asked for.
   The error of that is bounded, so only tokens that can be among the best are multiplied exactly, and those that have
   more than a small share of the sum. Of the others none has much of it, and their errors are independent of each other
   (packing.c), so they hardly add up.

   Parts do not depend on threads or rows, so neither do sums. Threads tell each other what they have found, so that
   less is looked at; results do not depend on it. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "operators.h"

enum { X, TABLE, SCALE, BIAS, WANTED, SMOOTHING };
enum { CHUNK = 1024, BLOCK = 256 }; /* tokens of a part, and of a tile of it */
enum { MOST_SCREENED = 16, FEW_ROWS = 8, LISTS = CHUNK / BLOCK };
static const float ULP = 0x1p-24f;
static const float LOG_SHARE = -6.9314718f; /* of 1/1024: tokens that have as much of a sum are exact */
static const float LARGE = 1e30f;      /* of a row: its products may overflow in steps, where they do not in floats */
static const float MOST_IN_SUM = 1.0f; /* that a logit of a sum may err by in words; OPUS-MT has 0.002 */

typedef struct {
    Weights weights, screening, words;
    Steps steps;
    int stored_int8, by_rows, screened, in_words;
    float *wide; /* [V], of screening: what the rounding of a bias can change */
} Candidates;

/* Tokens of a chunk that may be multiplied exactly, with their rough logits. */
typedef struct {
    int32_t token;
    float rough;
} Kept;

typedef struct {
    Kept *tokens;
    size_t count, room;
    size_t *ends; /* [LISTS, M]: where those of a block and row end */
} KeptList;

/* What is known of a row while it is screened. */
typedef struct {
    Bounds bounds;
    int bounded; /* else all of its tokens are multiplied exactly */
    float least; /* so many as are wanted have this exact logit or more */
    float total; /* log of the sum of e^logit, over the chunks so far */
} Row;

typedef struct {
    Candidates *op;
    const Packed *weights;
    const float *x, *table, *bias;
    int file; /* that the table is in; -1: read it in memory */
    int64_t offset;
    Int8Rows rounded;
    float *logits; /* [M,V] or NULL */
    size_t rows, depth, vocab, chunks;
    int wanted, summed;
    Ranking *rankings; /* [chunks, M] */
    float *best;       /* [chunks, M, wanted] */
    int64_t *tokens;   /* the same */
    float *floors;     /* [M], that a logit must reach to be among the best: so many are as large in a chunk before */
    Row *screened;     /* [M], or NULL */
    KeptList *kept;    /* [chunks] */
    float *out_logits, *out_best, *out_sum;
    int64_t *out_tokens;
} Call;

/* Logits of tokens first..end for all rows, without bias -> y [M, stride]. */
static void products(const Call *call, size_t first, size_t end, float *y, size_t stride) {
    const Packed *weights = call->weights;
    size_t panel = first / PANEL, last = (end + PANEL - 1) / PANEL;
    if (call->rounded.steps)
        kernels->int8_panels(&call->rounded, call->rows, &weights->int8, panel, last, y, stride);
    else if (weights->form == WORD_PANELS)
        kernels->word_panels(call->x, call->rows, &weights->words, panel, last, y, stride);
    else
        kernels->float_panels(call->x, call->rows, call->depth, weights->floats, call->vocab, panel, last, y, stride);
}

/* At least the difference between a token's rough and exact logit. */
static float bound_of(const Bounds *bounds, int64_t token) {
    float bound = bounds->of_weights * bounds->wrong[token] + bounds->of_rows * bounds->norms[token];
    return bounds->wide ? bound + bounds->wide[token] : bound;
}

/* So many tokens of the vocabulary as are wanted have this exact logit or more. */
static void raise_least(Row *row, const float *best, const int64_t *tokens, size_t wanted) {
    float least = best[0], before;
    for (size_t i = 0; i < wanted; i++) least = fminf(least, best[i] - bound_of(&row->bounds, tokens[i]));
    __atomic_load(&row->least, &before, __ATOMIC_RELAXED);
    if (least > before) __atomic_store(&row->least, &least, __ATOMIC_RELAXED);
}

/* Ranks some logits of a row among those of its chunk; returns the largest. Threads read and raise a row's floor as it
   comes: whichever they find, what is left out is not among the best, so the result is the same. */
static float rank_row(const Call *call, size_t chunk, size_t row, float *logits, size_t first, size_t count) {
    size_t place = chunk * call->rows + row, wanted = (size_t)call->wanted;
    float floor, largest, *best = call->best + place * wanted;
    const float *scale = call->weights->form == WORD_PANELS ? call->weights->scale + first : NULL;
    int64_t *tokens = call->tokens + place * wanted;
    __atomic_load(&call->floors[row], &floor, __ATOMIC_RELAXED);
    largest = kernels->rank(logits, scale, call->bias ? call->bias + first : NULL, first, count, call->wanted,
                            call->summed, floor, &call->rankings[place], best, tokens);
    if (call->rankings[place].count == call->wanted && best[wanted - 1] > floor) {
        __atomic_store(&call->floors[row], &best[wanted - 1], __ATOMIC_RELAXED);
        if (call->screened) raise_least(&call->screened[row], best, tokens, wanted);
    }
    return largest;
}

/* Adds tokens to those of a chunk that are kept. */
static void keep_tokens(KeptList *list, const int64_t *tokens, size_t count, const float *rough, size_t first) {
    if (list->count + count > list->room) {
        list->room = 2 * (list->count + count);
        list->tokens = realloc(list->tokens, list->room * sizeof(Kept));
        if (!list->tokens) abort();
    }
    for (size_t i = 0; i < count; i++)
        list->tokens[list->count++] = (Kept){(int32_t)tokens[i], rough[(size_t)tokens[i] - first]};
}

/* Keeps the tokens of a block that the whole vocabulary may not rule out. What is known of the sum is no more than all
   of it; the part of 0.0001 is more than rounding may have added. */
static void keep_block(const Call *call, size_t chunk, size_t first, size_t count, const float *rough, size_t stride,
                       const float *largest) {
    KeptList *list = &call->kept[chunk];
    const Bounds *any = &call->screened->bounds;
    float wrong = kernels->largest(any->wrong + first, count), norm = kernels->largest(any->norms + first, count);
    float wide = any->wide ? kernels->largest(any->wide + first, count) : 0;
    int64_t found[BLOCK];
    for (size_t r = 0; r < call->rows; r++, rough += stride) {
        Row *row = &call->screened[r];
        float t, total, of_chunk = call->rankings[chunk * call->rows + r].largest;
        __atomic_load(&row->least, &t, __ATOMIC_RELAXED);
        __atomic_load(&row->total, &total, __ATOMIC_RELAXED);
        total = fmaxf(total, of_chunk);
        if (call->summed) t = fminf(t, total + LOG_SHARE - 1e-4f * (1 + fabsf(total)));
        if (row->bounded && !(largest[r] + row->bounds.of_weights * wrong + row->bounds.of_rows * norm + wide < t))
            keep_tokens(list, found, kernels->reaching_tokens(rough, first, count, &row->bounds, t, found), rough,
                        first);
        list->ends[first % CHUNK / BLOCK * call->rows + r] = list->count;
    }
}

/* Adds a chunk to what is known of a row's sum, unless it hardly changes that. */
static void add_chunk(Row *row, const Ranking *chunk) {
    float sum, before;
    __atomic_load(&row->total, &before, __ATOMIC_RELAXED);
    if (!(chunk->largest > -INFINITY && chunk->largest > before - 16)) return;
    float added = chunk->largest + logf(chunk->sum);
    do sum = fmaxf(before, added) + log1pf(expf(-fabsf(before - added)));
    while (!__atomic_compare_exchange(&row->total, &before, &sum, 1, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
}

/* Ranks a block of tokens whose logits are in y. */
static void rank_block(const Call *call, size_t chunk, size_t first, size_t count, float *y, size_t stride) {
    float *largest = scratch(SCORES, call->rows * sizeof(float));
    for (size_t r = 0; r < call->rows; r++) largest[r] = rank_row(call, chunk, r, y + r * stride, first, count);
    if (call->screened) keep_block(call, chunk, first, count, y, stride, largest);
}

/* Few rows are multiplied with a chunk in one go, as what comes next is brought to the cache within a product only. */
static void rank_chunk(void *given, size_t chunk) {
    Call *call = given;
    size_t end = (chunk + 1) * CHUNK < call->vocab ? (chunk + 1) * CHUNK : call->vocab;
    size_t width = call->rows <= FEW_ROWS ? CHUNK : BLOCK, stride = call->logits ? call->vocab : width;
    float *tile = call->logits ? NULL : scratch(TILE, call->rows * width * sizeof(float));
    for (size_t r = 0; r < call->rows; r++) call->rankings[chunk * call->rows + r] = (Ranking){.largest = -INFINITY};
    for (size_t first = chunk * CHUNK; first < end; first += width) {
        size_t last = end - first < width ? end : first + width;
        float *y = call->logits ? call->logits + first : tile;
        products(call, first, last, y, stride);
        for (size_t at = first; at < last; at += BLOCK)
            rank_block(call, chunk, at, last - at < BLOCK ? last - at : BLOCK, y + at - first, stride);
    }
    for (size_t r = 0; call->screened && call->summed && r < call->rows; r++)
        add_chunk(&call->screened[r], &call->rankings[chunk * call->rows + r]);
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

/* Rows of a table in a mapped file are read from the file: the system would map 64 KB and more around each. */
static void exact_logits(const Call *call, size_t row, const int64_t *tokens, size_t count, float *logits) {
    enum { TOGETHER = 8 };
    const float *x = call->x + row * call->depth;
    size_t size = call->depth * sizeof(float);
    float *read = call->file < 0 ? NULL : scratch(STORED_ROW, TOGETHER * size);
    for (size_t i = 0, n; i < count; i += n) {
        int64_t places[TOGETHER];
        size_t there = 0;
        n = !read ? count : count - i < TOGETHER ? count - i : TOGETHER;
        for (; read && there < n; there++) {
            int64_t place = call->offset + tokens[i + there] * (int64_t)size;
            if (!read_file(call->file, place, read + there * call->depth, size)) break;
            places[there] = (int64_t)there;
        }
        const float *table = there == n ? read : call->table;
        kernels->gathered_products(x, call->depth, table, there == n ? places : tokens + i, n, logits + i);
    }
    for (size_t i = 0; call->bias && i < count; i++) logits[i] += call->bias[tokens[i]];
}

/* The bounds |x w - v q| <= |v| |w - q| + |x - v| |w|, where v and q are x and w as they are multiplied; to the latter
   comes what sums of D products in fp32 can err: the rough one and two exact ones. Not finite where x is not. */
static Bounds bounds_of(const Call *call, size_t row) {
    double length = 0, missed = 0;
    const float *x = call->x + row * call->depth;
    if (call->rounded.steps) {
        double step = (double)call->rounded.step * call->rounded.scale[row];
        const uint8_t *steps = call->rounded.steps + row * call->rounded.quads * 4;
        for (size_t d = 0; d < call->depth; d++) {
            double v = step * ((int)steps[d] - call->rounded.zero), error = (double)x[d] - v;
            length += v * v;
            missed += error * error;
        }
    } else {
        for (size_t d = 0; d < call->depth; d++) length += (double)x[d] * x[d];
    }
    float of_weights = (float)(sqrt(length) * (1 + 1e-6));
    float of_rows = (float)(sqrt(missed) * (1 + 1e-6)) + 4.0f * (float)(call->depth + 4) * ULP * of_weights;
    return (Bounds){of_weights, of_rows, call->weights->wrong, call->weights->norms, call->op->wide};
}

/* The sum of a row's e^(logit - shift) by rough logits; not a number where one of them is none or infinite. */
static double rough_sum(const Call *call, size_t row, double shift) {
    double sum = 0;
    for (size_t chunk = 0; chunk < call->chunks; chunk++) {
        const Ranking *one = &call->rankings[chunk * call->rows + row];
        if (one->bad) return NAN;
        if (call->summed && one->sum > 0) sum += (double)one->sum * exp((double)one->largest - shift);
    }
    return sum;
}

/* The tokens of a row that are multiplied exactly, ascending: those whose logit can be `least` or more, and those whose
   rough one is `shared` or more. */
static size_t tokens_in_question(const Call *call, size_t row, float least, float shared, int64_t *found,
                                 float *rough) {
    size_t n = 0, rows = call->rows;
    for (size_t chunk = 0; chunk < call->chunks; chunk++) {
        const KeptList *list = &call->kept[chunk];
        for (size_t block = 0; block < LISTS && chunk * CHUNK + block * BLOCK < call->vocab; block++) {
            size_t place = block * rows + row;
            for (size_t i = place ? list->ends[place - 1] : 0; i < list->ends[place]; i++) {
                Kept one = list->tokens[i];
                if (one.rough + bound_of(&call->screened[row].bounds, one.token) < least && one.rough < shared)
                    continue;
                rough[n] = one.rough, found[n++] = one.token;
            }
        }
    }
    return n;
}

/* A row's best tokens by their exact logits, and its sum. None of the best has a lower logit than the least of the
   tokens that are roughly best, so the others need not be multiplied again. */
static double settled(const Call *call, size_t row, float *best, int64_t *tokens, int *count) {
    size_t roughly = (size_t)merged(call, row, best, tokens);
    float t[MOST_SCREENED], least = INFINITY, *rough = scratch(SCORES, call->vocab * sizeof(float)),
                            *logits = scratch(TILE, call->vocab * sizeof(float));
    int64_t *asked = scratch(SLOTS, call->vocab * sizeof(int64_t));
    double rough_best = roughly ? best[0] : 0, total = rough_sum(call, row, rough_best), sum = 0;
    float shared = call->summed ? (float)(rough_best + log(total)) + LOG_SHARE : INFINITY;
    exact_logits(call, row, tokens, roughly, t);
    for (size_t i = 0; i < roughly; i++) least = fminf(least, t[i]);
    if (roughly < (size_t)call->wanted) least = -INFINITY;
    size_t n = tokens_in_question(call, row, least, shared, asked, rough);
    exact_logits(call, row, asked, n, logits);
    for (size_t i = 0; i < n; i++) place_best(logits[i], asked[i], -INFINITY, call->wanted, count, best, tokens);
    if (!*count || isnan(total)) return NAN;
    for (int i = 0; !call->summed && i < *count; i++) sum += exp((double)best[i] - best[0]);
    if (!call->summed) return sum;
    for (size_t i = 0; i < n; i++) /* no others, which are there or not as threads found them */
        if (rough[i] >= shared) sum += exp((double)logits[i] - best[0]) - exp((double)rough[i] - best[0]);
    return sum + total * exp(rough_best - best[0]);
}

/* The same where rounding has no bounds: of all logits. */
static double settled_exactly(const Call *call, size_t row, float *best, int64_t *tokens, int *count) {
    float *logits = scratch(TILE, call->vocab * sizeof(float));
    int64_t *all = scratch(SLOTS, call->vocab * sizeof(int64_t));
    double sum = 0;
    int bad = 0;
    for (size_t i = 0; i < call->vocab; i++) all[i] = (int64_t)i;
    exact_logits(call, row, all, call->vocab, logits);
    for (size_t i = 0; i < call->vocab; i++) {
        bad |= !(logits[i] < INFINITY);
        place_best(logits[i], all[i], -INFINITY, call->wanted, count, best, tokens);
    }
    if (bad || !*count) return NAN;
    size_t terms = call->summed ? call->vocab : (size_t)*count;
    for (size_t i = 0; i < terms; i++) sum += exp((double)(call->summed ? logits : best)[i] - best[0]);
    return sum;
}

static void settle_row(void *given, size_t row) {
    Call *call = given;
    size_t wanted = (size_t)call->wanted;
    float *best = call->out_best + row * wanted;
    int64_t *tokens = call->out_tokens + row * wanted;
    int count = 0;
    double sum = (call->screened[row].bounded ? settled : settled_exactly)(call, row, best, tokens, &count);
    for (int i = count; i < call->wanted; i++) best[i] = -INFINITY, tokens[i] = 0;
    call->out_sum[row] = best[0] == -INFINITY ? NAN : (float)sum;
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

static Status screened(Call *call, void *context) {
    size_t *ends = scratch(ENDS, call->chunks * LISTS * call->rows * sizeof(size_t));
    call->screened = scratch(SCREENED, call->rows * sizeof(Row));
    call->kept = scratch(KEPT, call->chunks * sizeof(KeptList));
    for (size_t r = 0; r < call->rows; r++) {
        Bounds bounds = bounds_of(call, r);
        int bounded = bounds.of_weights < LARGE && bounds.of_rows < LARGE;
        if (call->summed) bounded &= bounds.of_weights * call->weights->most_wrong < MOST_IN_SUM;
        call->screened[r] = (Row){bounds, bounded, -INFINITY, -INFINITY};
    }
    for (size_t i = 0; i < call->chunks; i++) call->kept[i] = (KeptList){.ends = ends + i * LISTS * call->rows};
    reserve_ranks(call);
    Status failed = in_parallel(context, rank_chunk, call->chunks, call);
    if (!failed) failed = in_parallel(context, settle_row, call->rows, call);
    for (size_t i = 0; i < call->chunks; i++) free(call->kept[i].tokens);
    return failed;
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
    if ((call.summed ? op->in_words : op->screened) && asked && count <= MOST_SCREENED) {
        call.weights = weights_of(call.summed ? &op->words : &op->screening, &table, NULL, op->by_rows,
                                  call.summed ? WORD_PANELS : SCREENING);
        if (call.weights->finite) {
            call.file = mapped_file(table.data, table.count * sizeof(float), &call.offset);
            if (call.bias && !__atomic_load_n(&op->wide, __ATOMIC_ACQUIRE)) widen(op, call.bias, call.vocab);
            if (!call.summed) round_all(&call, (Steps){127, 128, 1, 0.0f}, NULL);
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
    op->in_words = int_attribute(info, "words", 0) && op->by_rows;
    op->steps = steps_of(info);
    *kernel = op;
    return NULL;
}

static void destroy(void *kernel) {
    Candidates *op = kernel;
    give_back(op->weights.packed);
    give_back(op->screening.packed);
    give_back(op->words.packed);
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
