/* Attention of few queries over cache slots or a source. Part of compute.h. */
/* scores [count] -> their softmax, in place. */
static void softmax(float *scores, size_t count) {
    size_t c, whole = count / W * W, n = count - whole; /* n: behind the last whole vector */
    Floats most = vall(-INFINITY), sum = vzero(), rest = vzero();
    for (c = 0; c < whole; c += W) most = vmax(most, vload(scores + c));
    if (n) most = vmax(most, vfirst(vload_part(scores + whole, n), n, most));
    Floats shift = vall(vmost(most));
    for (c = 0; c < whole; c += W) {
        Floats v = vexp(vsub(vload(scores + c), shift));
        sum = vadd(sum, v);
        vstore(scores + c, v);
    }
    if (n) rest = vfirst(vexp(vsub(vload_part(scores + whole, n), shift)), n, rest);
    Floats factor = vall(1.0f / vsum(vadd(sum, rest)));
    for (c = 0; c < whole; c += W) vstore(scores + c, vmul(vload(scores + c), factor));
    if (n) vstore_part(scores + whole, vmul(rest, factor), n);
}

/* The sum of value rows, weighted: context [width]. `slots` are the rows; NULL: 0, 1, 2, ... */
static void weighted_rows(const float *weights, const float *values, const int32_t *slots, size_t count, size_t width,
                          float *context) {
    size_t e = 0;
    for (; e + 4 * W <= width; e += 4 * W) {
        Floats sum[4] = {vzero(), vzero(), vzero(), vzero()};
        for (size_t i = 0; i < count; i++) {
            const float *row = values + (slots ? (size_t)slots[i] : i) * width + e;
            Floats each = vall(weights[i]);
            UNROLL for (int j = 0; j < 4; j++) sum[j] = vfma(each, vload(row + j * W), sum[j]);
        }
        UNROLL for (int j = 0; j < 4; j++) vstore(context + e + j * W, sum[j]);
    }
    for (; e < width; e += W) {
        size_t n = width - e < W ? width - e : W;
        Floats sum = vzero();
        for (size_t i = 0; i < count; i++) {
            const float *row = values + (slots ? (size_t)slots[i] : i) * width + e;
            sum = vfma(vall(weights[i]), vload_part(row, n), sum);
        }
        vstore_part(context + e, sum, n);
    }
}

/* Products of a query with the keys of four slots: summing a vector takes longest, and four together little longer. */
INLINE void slot_scores(const float *query, const float *keys, const int32_t *slots, size_t width, float *scores) {
    const float *key[SLOTS_TOGETHER];
    Floats sum[SLOTS_TOGETHER];
    UNROLL for (int i = 0; i < SLOTS_TOGETHER; i++) key[i] = keys + (size_t)slots[i] * width, sum[i] = vzero();
    size_t e = 0;
    for (; e + W <= width; e += W) {
        Floats q = vload(query + e);
        UNROLL for (int i = 0; i < SLOTS_TOGETHER; i++) sum[i] = vfma(q, vload(key[i] + e), sum[i]);
    }
    if (e < width) {
        Floats q = vload_part(query + e, width - e);
        UNROLL for (int i = 0; i < SLOTS_TOGETHER; i++) sum[i] = vfma(q, vload_part(key[i] + e, width - e), sum[i]);
    }
    _mm_storeu_ps(scores, vsum4(sum[0], sum[1], sum[2], sum[3]));
}

static void attend_slots(const float *q, float scale, const float *keys, const float *values, const int32_t *slots,
                         size_t count, size_t width, float *scores, float *context) {
    float *query = scores + count + SLOTS_TOGETHER;
    for (size_t e = 0; e < width; e++) query[e] = q[e] * scale;
    size_t i = 0;
    for (; i + SLOTS_TOGETHER <= count; i += SLOTS_TOGETHER) slot_scores(query, keys, slots + i, width, scores + i);
    if (i < count) {
        int32_t rest[SLOTS_TOGETHER];
        for (size_t j = 0; j < SLOTS_TOGETHER; j++) rest[j] = slots[i + j < count ? i + j : i];
        slot_scores(query, keys, rest, width, scores + i);
    }
    softmax(scores, count);
    weighted_rows(scores, values, slots, count, width, context);
}

/* Queries [beams] over a source's keys [width, length] (transposed) -> scores [beams, length], without softmax. */
INLINE void source_tile(const int beams, const int vectors, const float *q, size_t width, const float *keys,
                        size_t length, size_t last, float *scores) {
    Floats sum[4][4];
    UNROLL for (int b = 0; b < beams; b++) UNROLL for (int v = 0; v < vectors; v++) sum[b][v] = vzero();
    for (size_t e = 0; e < width; e++) {
        Floats key[4];
        UNROLL for (int v = 0; v < vectors; v++) key[v] = v + 1 < vectors || last == W
                                                              ? vload(keys + e * length + v * W)
                                                              : vload_part(keys + e * length + v * W, last);
        UNROLL for (int b = 0; b < beams; b++) {
            Floats each = vall(q[b * width + e]);
            UNROLL for (int v = 0; v < vectors; v++) sum[b][v] = vfma(each, key[v], sum[b][v]);
        }
    }
    UNROLL for (int b = 0; b < beams; b++) UNROLL for (int v = 0; v < vectors; v++) {
        float *place = scores + b * length + v * W;
        if (v + 1 < vectors || last == W)
            vstore(place, sum[b][v]);
        else
            vstore_part(place, sum[b][v], last);
    }
}

#define SOURCE_TILE(beams, vectors) source_tile(beams, vectors, q, width, keys, length, last, scores)
static void source_tiles(int beams, int vectors, const float *q, size_t width, const float *keys, size_t length,
                         size_t last, float *scores) {
    if (vectors == 1) switch (beams) {
            case 1: SOURCE_TILE(1, 1); break;
            case 2: SOURCE_TILE(2, 1); break;
            case 3: SOURCE_TILE(3, 1); break;
            default: SOURCE_TILE(4, 1); break;
        }
    else
        switch (beams) {
            case 1: SOURCE_TILE(1, 2); break;
            case 2: SOURCE_TILE(2, 2); break;
            case 3: SOURCE_TILE(3, 2); break;
            default: SOURCE_TILE(4, 2); break;
        }
}

/* Queries of one source and head over its keys [width, length] and values [length, width]. `scores` has room for
   beams * (length + width); it leaves with the attention weights [beams, length] first. Masked places have weight 0;
   where all are masked, all weigh the same. */
static void attend_source(const float *q, size_t beams, size_t q_stride, float scale, const float *keys,
                          const float *values, const uint8_t *mask, size_t length, size_t width, float *scores,
                          float *context, size_t context_stride) {
    float *queries = scores + beams * length;
    for (size_t b = 0; b < beams; b++)
        for (size_t e = 0; e < width; e++) queries[b * width + e] = q[b * q_stride + e] * scale;
    for (size_t s = 0; s < length; s += 2 * W) {
        size_t left = length - s < 2 * W ? length - s : 2 * W;
        int vectors = left > W ? 2 : 1;
        for (size_t b = 0; b < beams; b += 4)
            source_tiles((int)(beams - b < 4 ? beams - b : 4), vectors, queries + b * width, width, keys + s, length,
                         left - (size_t)(vectors - 1) * W, scores + b * length + s);
    }
    size_t seen = length; /* up to the last place that is not masked */
    int holes = 0;
    if (mask) {
        while (seen && !mask[seen - 1]) seen--;
        for (size_t s = 0; s < seen; s++) holes |= !mask[s];
    }
    for (size_t b = 0; b < beams; b++) {
        float *row = scores + b * length;
        if (!seen) {
            for (size_t s = 0; s < length; s++) row[s] = 1.0f / (float)length;
        } else {
            for (size_t s = 0; holes && s < seen; s++) row[s] = mask[s] ? row[s] : -INFINITY;
            softmax(row, seen);
            for (size_t s = 0; holes && s < seen; s++) row[s] = mask[s] ? row[s] : 0.0f;
            for (size_t s = seen; s < length; s++) row[s] = 0.0f;
        }
        weighted_rows(row, values, NULL, seen ? seen : length, width, context + b * context_stride);
    }
}

/* Queries of one source and head over its keys and values in panels. `scores` has room for queries * (count + width).
 */
static void attend_panels(const float *q, size_t queries, size_t q_stride, float scale, const float *keys,
                          const float *values, size_t count, size_t width, float *scores, float *context,
                          size_t context_stride) {
    float *scaled = scores + queries * count;
    for (size_t i = 0; i < queries; i++)
        for (size_t e = 0; e < width; e++) scaled[i * width + e] = q[i * q_stride + e] * scale;
    float_panels(scaled, queries, width, keys, count, 0, (count + PANEL - 1) / PANEL, scores, count);
    for (size_t i = 0; i < queries; i++) softmax(scores + i * count, count);
    float_panels(scores, queries, count, values, width, 0, (width + PANEL - 1) / PANEL, context, context_stride);
}
