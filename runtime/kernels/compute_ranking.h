/* Best tokens, sums over the vocabulary, and which tokens rounding leaves in question. Part of compute.h. */
/* Products of one row with some rows of a table, summed as float_panels sums them: the same bits. */
static void gathered_products(const float *x, size_t depth, const float *table, const int64_t *tokens, size_t count,
                              float *y) {
    enum { TOKENS = 8 };
    for (size_t i = 0; i < count; i += TOKENS) {
        size_t n = count - i < TOKENS ? count - i : TOKENS;
        const float *rows[TOKENS];
        float total[TOKENS];
        UNROLL for (size_t j = 0; j < TOKENS; j++) rows[j] = table + (size_t)tokens[i + (j < n ? j : 0)] * depth;
        for (size_t from = 0; from < depth; from += DEPTH) {
            size_t to = from + DEPTH < depth ? from + DEPTH : depth;
            float sum[TOKENS] = {0};
            for (size_t d = from; d < to; d++)
                UNROLL for (size_t j = 0; j < TOKENS; j++) sum[j] = __builtin_fmaf(x[d], rows[j][d], sum[j]);
            UNROLL for (size_t j = 0; j < TOKENS; j++) total[j] = from ? total[j] + sum[j] : sum[j];
        }
        for (size_t j = 0; j < n; j++) y[i + j] = total[j];
    }
}

/* Scale, bias and ranking of n logits from c on; `found` are those that may be among the best. */
INLINE Floats rank_vector(float *logits, const float *scale, const float *bias, size_t c, size_t n, float bar,
                          unsigned *found, unsigned *bad) {
    Floats v = n == W ? vload(logits + c) : vload_part(logits + c, n);
    if (scale) v = vmul(v, n == W ? vload(scale + c) : vload_part(scale + c, n));
    if (bias) v = vadd(v, n == W ? vload(bias + c) : vload_part(bias + c, n));
    if (scale || bias) {
        if (n == W)
            vstore(logits + c, v);
        else
            vstore_part(logits + c, v, n);
    }
    *bad |= not_numbers(v, n);
    *found = reaching(v, bar, n);
    return v;
}

static float rank(float *logits, const float *scale, const float *bias, size_t first, size_t count, int wanted,
                  int summed, float floor, Ranking *state, float *best, int64_t *tokens) {
    enum { VECTORS = 4 }; /* looked at together: hardly any has one of the best */
    Floats most = vall(-INFINITY);
    unsigned bad = 0;
    for (size_t c = 0; c < count; c += VECTORS * W) {
        float bar = state->count == wanted ? best[wanted - 1] : floor;
        unsigned found[VECTORS] = {0}, any = 0;
        if (count - c >= VECTORS * W)
            UNROLL for (size_t i = 0; i < VECTORS; i++) {
                most = vmax(rank_vector(logits, scale, bias, c + i * W, W, bar, &found[i], &bad), most);
                any |= found[i];
            }
        else
            for (size_t i = 0; i < VECTORS && c + i * W < count; i++) {
                size_t n = count - c - i * W < W ? count - c - i * W : W;
                Floats v = rank_vector(logits, scale, bias, c + i * W, n, bar, &found[i], &bad);
                most = vmax(n == W ? v : vfirst(v, n, most), most);
                any |= found[i];
            }
        for (size_t i = 0; any && i < VECTORS; i++)
            for (; found[i]; found[i] &= found[i] - 1) {
                size_t column = c + i * W + (size_t)__builtin_ctz(found[i]);
                place_best(logits[column], (int64_t)(first + column), floor, wanted, &state->count, best, tokens);
            }
    }
    float largest = vmost(most);
    if (bad || largest == INFINITY) state->bad = 1;
    if (!summed) return largest;
    if (largest > state->largest) {
        if (state->sum > 0) state->sum *= expf(state->largest - largest);
        state->largest = largest;
    }
    if (state->largest == -INFINITY) return largest; /* nothing but -inf so far */
    Floats sum = vzero(), shift = vall(state->largest);
    size_t c = 0;
    for (; c + W <= count; c += W) sum = vadd(sum, vpower(vmul(vsub(vload(logits + c), shift), vall(1.44269504f))));
    float rest = 0;
    for (; c < count; c++) rest += expf(logits[c] - state->largest);
    state->sum += vsum(sum) + rest;
    return largest;
}

/* A bound is of_weights * wrong + of_rows * norms + wide (or none). */
static size_t reaching_tokens(const float *rough, size_t first, size_t count, const Bounds *bounds, float t,
                              int64_t *tokens) {
    size_t found = 0;
    for (size_t c = 0; c < count; c += W) {
        size_t n = count - c < W ? count - c : W, token = first + c;
        Floats bound = vmul(vall(bounds->of_weights), vload_part(bounds->wrong + token, n));
        bound = vfma(vall(bounds->of_rows), vload_part(bounds->norms + token, n), bound);
        if (bounds->wide) bound = vadd(bound, vload_part(bounds->wide + token, n));
        unsigned lanes = reaching(vadd(vload_part(rough + c, n), bound), t, n);
        for (; lanes; lanes &= lanes - 1) tokens[found++] = (int64_t)(token + (size_t)__builtin_ctz(lanes));
    }
    return found;
}

/* The largest of n numbers, or 0. */
static float largest(const float *numbers, size_t count) {
    Floats most = vzero();
    size_t c = 0;
    for (; c + W <= count; c += W) most = vmax(vload(numbers + c), most);
    if (c < count) most = vmax(vfirst(vload_part(numbers + c, count - c), count - c, most), most);
    return vmost(most);
}
