/* EncoderAttention: every place of a source over all its places that are not masked.

   A source's keys and values of a head are packed as weights of a product are, so that both products are those of
   Linear. Masked places are not packed: they weigh nothing, and nothing depends on them or on padding.

       keys    [S,E] -> [ceil(S/32)][E][32]
       values  [S,E] -> [ceil(E/32)][S][32] */
#include <stdlib.h>
#include <string.h>
#include <xmmintrin.h>

#include "operators.h"

enum { QUERY_BLOCK = 48 }; /* queries whose scores are in the cache at once: whole tiles of either instruction set */

typedef struct {
    int heads;
    float scale;
} Attention;

typedef struct {
    const Attention *op;
    const float *qkv;    /* [B, S, 3, H, E] */
    const uint8_t *mask; /* [B, S] or NULL */
    float *context;
    size_t heads, width, length;
} Call;

static size_t whole_panels(size_t columns) { return (columns + PANEL - 1) / PANEL * PANEL; }

/* Places that are not masked -> how many. */
static size_t seen_places(const uint8_t *mask, size_t length, int32_t *places) {
    size_t found = 0;
    for (size_t s = 0; s < length; s++) {
        places[found] = (int32_t)s;
        found += !mask || mask[s];
    }
    return found;
}

static void pack_keys(const float *rows, size_t stride, const int32_t *places, size_t count, size_t width,
                      float *panels) {
    if (count % PANEL) memset(panels + count / PANEL * PANEL * width, 0, PANEL * width * sizeof(float));
    for (size_t i = 0; i < count; i += 4) {
        size_t keys = count - i < 4 ? count - i : 4, e = 0;
        const float *key[4];
        for (size_t j = 0; j < 4; j++) key[j] = rows + (size_t)places[i + (j < keys ? j : 0)] * stride;
        float *to = panels + i / PANEL * PANEL * width + i % PANEL;
        for (; keys == 4 && e + 4 <= width; e += 4) {
            __m128 a = _mm_loadu_ps(key[0] + e), b = _mm_loadu_ps(key[1] + e);
            __m128 c = _mm_loadu_ps(key[2] + e), d = _mm_loadu_ps(key[3] + e);
            _MM_TRANSPOSE4_PS(a, b, c, d);
            _mm_storeu_ps(to + e * PANEL, a);
            _mm_storeu_ps(to + (e + 1) * PANEL, b);
            _mm_storeu_ps(to + (e + 2) * PANEL, c);
            _mm_storeu_ps(to + (e + 3) * PANEL, d);
        }
        for (; e < width; e++)
            for (size_t j = 0; j < keys; j++) to[e * PANEL + j] = key[j][e];
    }
}

static void pack_values(const float *rows, size_t stride, const int32_t *places, size_t count, size_t width,
                        float *panels) {
    for (size_t first = 0; first < width; first += PANEL) {
        size_t part = width - first < PANEL ? width - first : PANEL;
        for (size_t i = 0; i < count; i++, panels += PANEL) {
            memcpy(panels, rows + (size_t)places[i] * stride + first, part * sizeof(float));
            if (part < PANEL) memset(panels + part, 0, (PANEL - part) * sizeof(float));
        }
    }
}

static void attend_part(void *given, size_t part) { /* one head of one source */
    Call *call = given;
    size_t heads = call->heads, width = call->width, length = call->length, source = part / heads, head = part % heads;
    size_t stride = 3 * heads * width;
    const float *q = call->qkv + source * length * stride + head * width;
    float *context = call->context + source * length * heads * width + head * width;
    int32_t *places = scratch(SLOTS, (length + 1) * sizeof(int32_t));
    size_t count = seen_places(call->mask ? call->mask + source * length : NULL, length, places);
    int none = !count; /* then all places weigh the same */
    if (none) count = seen_places(NULL, length, places);
    float *keys = scratch(KEY_PANELS, whole_panels(count) * width * sizeof(float));
    float *values = scratch(VALUE_PANELS, whole_panels(width) * count * sizeof(float));
    float *scores = scratch(SCORES, QUERY_BLOCK * (count + width) * sizeof(float));
    pack_keys(q + heads * width, stride, places, count, width, keys);
    pack_values(q + 2 * heads * width, stride, places, count, width, values);
    for (size_t s = 0; s < length; s += QUERY_BLOCK) {
        size_t queries = length - s < QUERY_BLOCK ? length - s : QUERY_BLOCK;
        kernels->attend_panels(q + s * stride, queries, stride, none ? 0.0f : call->op->scale, keys, values, count,
                               width, scores, context + s * heads * width, heads * width);
    }
}

static Status compute(void *kernel, void *context) {
    Attention *op = kernel;
    Tensor qkv, mask;
    int masked = input_of(context, 1, &mask);
    if (op->heads < 1 || !input_of(context, 0, &qkv) || qkv.rank != 3 || qkv.dims[2] % (3 * op->heads) ||
        (masked && (mask.rank != 2 || mask.dims[0] != qkv.dims[0] || mask.dims[1] != qkv.dims[1])))
        return error_of("EncoderAttention: qkv [B,S,3HE] and source_mask [B,S] do not fit");
    int64_t dims[] = {qkv.dims[0], qkv.dims[1], qkv.dims[2] / 3};
    Call call = {.op = op,
                 .qkv = qkv.data,
                 .mask = masked ? mask.data : NULL,
                 .context = output_of(context, 0, dims, 3),
                 .heads = (size_t)op->heads,
                 .width = (size_t)(dims[2] / op->heads),
                 .length = (size_t)dims[1]};
    if (!qkv.count) return NULL;
    size_t parts = (size_t)dims[0] * call.heads, work = 2 * parts * call.length * call.length * call.width;
    if (work >= 2 * least_work(context)) return in_parallel(context, attend_part, parts, &call);
    for (size_t i = 0; i < parts; i++) attend_part(&call, i);
    return NULL;
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    (void)operator, (void)functions;
    Attention *op = calloc(1, sizeof *op);
    if (!op) return error_of("out of memory");
    op->heads = int_attribute(info, "heads", 1);
    op->scale = float_attribute(info, "scale", 1.0f);
    *kernel = op;
    return NULL;
}

Operator encoder_attention = {.called = "EncoderAttention",
                              .inputs = "fB",
                              .outputs = "f",
                              .create_or_fail = create,
                              .compute_or_fail = compute,
                              .destroy = free};
