/* What the operators compute, apart from how ONNX Runtime calls them. One table of functions for each instruction set.

   Shapes: M rows, D inputs of a product, N outputs, V tokens, B sources, K beams, H heads, E head dim, S source, L
   slots.

   Weights of products are stored in panels of 32 outputs:
       float   [ceil(N/32)][D][32]
       words   the same, of 16 bits: steps of each output's own scale
       int8    [ceil(N/32)][ceil(D/4)][32][4], for instructions that add four products of a pair of operands
   A row's result never depends on other rows: sums run over D in one order, however many rows are multiplied together.
 */
#ifndef SEQ2ENGINE_KERNELS_H
#define SEQ2ENGINE_KERNELS_H

#include <stddef.h>
#include <stdint.h>

enum { PANEL = 32, DEPTH = 512 /* inputs that are summed before they are added to the sum of those before */ };
enum { SLOTS_TOGETHER = 4 }; /* cache slots whose scores are summed at a time */
enum Activation { NO_ACTIVATION, RELU, GELU, SILU };

/* How a row is rounded to int8: `above` steps from 0 to its scale, `zero` below; its scale is at least `least`.
   `is_signed`: the scale is its largest magnitude, else its largest number. */
typedef struct {
    int above, zero, is_signed;
    float least;
} Steps;

typedef struct {
    const float *bias, *residual; /* [N], [M,N]; or NULL */
    enum Activation activation;
} Epilogue;

typedef struct {
    const int8_t *panels;
    const float *scale;  /* [N] */
    const int32_t *sums; /* [N], of each output's weights: what a zero above 0 adds */
    size_t depth, columns;
} Int8Weights;

typedef struct {
    const int16_t *panels;
    const float *scale; /* [N] */
    size_t depth, columns;
} WordWeights;

typedef struct {
    const uint8_t *steps; /* [M, quads * 4] */
    const float *scale;   /* [M] */
    size_t quads;
    int zero;
    float step;
} Int8Rows;

/* Best tokens of a row so far, largest logit first, and the sum of exp(logit - largest). */
typedef struct {
    float largest, sum;
    int count, bad; /* bad: a logit was not a number, or infinite */
} Ranking;

/* Puts a logit among the `count` best so far, if it is one of the best: behind those that are as large. None is below
   `floor`, and what is not a number is none. */
static inline void place_best(float value, int64_t token, float floor, int wanted, int *count, float *best,
                              int64_t *tokens) {
    int full = *count == wanted;
    if (full ? !(value > best[wanted - 1]) : !(value >= floor)) return;
    int place = full ? wanted - 1 : (*count)++;
    for (; place > 0 && value > best[place - 1]; place--) {
        best[place] = best[place - 1];
        tokens[place] = tokens[place - 1];
    }
    best[place] = value;
    tokens[place] = token;
}

/* Of what rounding can change in a row's products with tokens. */
typedef struct {
    float of_weights, of_rows;
    const float *wrong, *norms, *wide; /* a number for each token; wide may be NULL */
} Bounds;

typedef struct {
    int width; /* numbers in a vector */

    /* Panels first..end of y [M,N] = x [M,D] times weights; *_product ends with bias, activation and residual, *_panels
       writes them to columns 0.. of y [M, stride]. */
    void (*float_product)(const float *x, size_t rows, size_t depth, const float *panels, size_t columns, size_t first,
                          size_t end, const Epilogue *then, float *y);
    void (*float_panels)(const float *x, size_t rows, size_t depth, const float *panels, size_t columns, size_t first,
                         size_t end, float *y, size_t stride);
    void (*word_panels)(const float *x, size_t rows, const WordWeights *w, size_t first, size_t end, float *y,
                        size_t stride); /* without the outputs' scales */
    void (*int8_product)(const Int8Rows *x, size_t rows, const Int8Weights *w, size_t first, size_t end,
                         const Epilogue *then, float *y);
    void (*int8_panels)(const Int8Rows *x, size_t rows, const Int8Weights *w, size_t first, size_t end, float *y,
                        size_t stride);
    /* Rows first..end of x [M,D], each times `smoothing` [D] or NULL -> to [M, D rounded up to 4], and their scales. */
    void (*round_rows)(const float *x, size_t first, size_t end, size_t depth, const float *smoothing, Steps steps,
                       uint8_t *to, float *scale);
    void (*normalise)(float *rows, size_t first, size_t end, size_t columns, const float *weight, const float *bias,
                      float epsilon, int rms);
    /* Products of one row [D] with some rows of a table [V,D] -> y [count]; the same bits as float_panels. */
    void (*gathered_products)(const float *x, size_t depth, const float *table, const int64_t *tokens, size_t count,
                              float *y);
    void (*multiply)(const float *a, const float *b, size_t count, float *to);

    /* Scales the logits of tokens first..first+count, adds a bias to them (or neither: NULL) and ranks them: best
       [wanted] and their tokens, and the sum if asked for. Logits below `floor` are not among the best of the whole
       vocabulary. Returns the largest. */
    float (*rank)(float *logits, const float *scale, const float *bias, size_t first, size_t count, int wanted,
                  int summed, float floor, Ranking *state, float *best, int64_t *tokens);
    /* Of tokens first..first+count those whose exact logits may be t or more -> how many. */
    size_t (*reaching_tokens)(const float *rough, size_t first, size_t count, const Bounds *bounds, float t,
                              int64_t *tokens);
    float (*largest)(const float *numbers, size_t count); /* or 0 */

    /* One query over some slots of a cache [L,E]; `scores` has room for count + E + SLOTS_TOGETHER. */
    void (*attend_slots)(const float *q, float scale, const float *keys, const float *values, const int32_t *slots,
                         size_t count, size_t width, float *scores, float *context);
    void (*attend_source)(const float *q, size_t beams, size_t q_stride, float scale, const float *keys,
                          const float *values, const uint8_t *mask, size_t length, size_t width, float *scores,
                          float *context, size_t context_stride);
    /* Queries over `count` keys [ceil(count/32)][E][32] and values [ceil(E/32)][count][32]. */
    void (*attend_panels)(const float *q, size_t queries, size_t q_stride, float scale, const float *keys,
                          const float *values, size_t count, size_t width, float *scores, float *context,
                          size_t context_stride);
} Kernels;

extern const Kernels avx2_kernels, avx512_kernels;

#endif
