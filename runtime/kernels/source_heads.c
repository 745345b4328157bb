/* SourceHeads: keys and values of the source cut into heads, as cross-attention reads them.

       kv [B,S,2,H,E] -> keys [B,H,S,E], or [B,H,E,S] where they are transposed; values [B,H,S,E] */
#include <stdlib.h>
#include <string.h>

#include "operators.h"

enum { TOGETHER = 16 /* places of which transposed keys are written side by side: a line of the cache */ };

typedef struct {
    int heads, transposed;
} SourceHeads;

typedef struct {
    const float *kv;
    float *keys, *values;
    size_t heads, width, length;
    int transposed;
} Call;

static void cut_part(void *given, size_t part) { /* one head of one source */
    Call *call = given;
    size_t heads = call->heads, width = call->width, length = call->length, stride = 2 * heads * width;
    const float *k = call->kv + part / heads * length * stride + part % heads * width, *v = k + heads * width;
    float *keys = call->keys + part * length * width, *values = call->values + part * length * width;
    for (size_t s = 0; s < length; s++) memcpy(values + s * width, v + s * stride, width * sizeof(float));
    for (size_t s = 0; !call->transposed && s < length; s++)
        memcpy(keys + s * width, k + s * stride, width * sizeof(float));
    for (size_t first = 0; call->transposed && first < length; first += TOGETHER) {
        size_t end = first + TOGETHER < length ? first + TOGETHER : length;
        for (size_t e = 0; e < width; e++)
            for (size_t s = first; s < end; s++) keys[e * length + s] = k[s * stride + e];
    }
}

static Status compute(void *kernel, void *context) {
    SourceHeads *op = kernel;
    Tensor kv;
    if (op->heads < 1 || !input_of(context, 0, &kv) || kv.rank != 3 || kv.dims[2] % (2 * op->heads))
        return error_of("SourceHeads: kv [B,S,2HE] does not fit the heads");
    int64_t width = kv.dims[2] / (2 * op->heads), dims[] = {kv.dims[0], op->heads, kv.dims[1], width};
    int64_t turned[] = {kv.dims[0], op->heads, width, kv.dims[1]};
    Call call = {.kv = kv.data,
                 .keys = output_of(context, 0, op->transposed ? turned : dims, 4),
                 .values = output_of(context, 1, dims, 4),
                 .heads = (size_t)op->heads,
                 .width = (size_t)width,
                 .length = (size_t)kv.dims[1],
                 .transposed = op->transposed};
    if (!kv.count) return NULL; /* empty outputs have no memory */
    if (!call.keys || !call.values) return error_of("SourceHeads: an output is missing");
    size_t parts = (size_t)kv.dims[0] * call.heads;
    if (kv.count >= least_work(context)) return in_parallel(context, cut_part, parts, &call);
    for (size_t i = 0; i < parts; i++) cut_part(&call, i);
    return NULL;
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    (void)operator, (void)functions;
    SourceHeads *op = calloc(1, sizeof *op);
    if (!op) return error_of("out of memory");
    op->heads = int_attribute(info, "heads", 1);
    op->transposed = int_attribute(info, "transposed", 0);
    *kernel = op;
    return NULL;
}

Operator source_heads = {.called = "SourceHeads",
                         .inputs = "f",
                         .outputs = "ff",
                         .create_or_fail = create,
                         .compute_or_fail = compute,
                         .destroy = free};
