/* SelfAttention over a tree cache, which it writes in place, and CrossAttention over the source. */
#include <stdlib.h>
#include <string.h>

#include "operators.h"

typedef struct {
    int heads, transposed;
    float scale;
} Attention;

typedef struct {
    const Attention *op;
    const float *q, *keys, *values; /* q: the three of self-attention side by side, [B, K, 3, H, E] */
    float *new_keys, *new_values, *context, *weights;
    const int64_t *write_index, *sources; /* sources: as in Frame */
    const uint8_t *mask;
    size_t beams, heads, width, length, groups; /* length: slots or source; groups: parts of a source's heads */
    int failed;
} Call;

static void *scores_of(size_t numbers) { return scratch(SCORES, numbers * sizeof(float)); }

/* The slots that a beam sees -> how many. None: all, as softmax over equal scores has it. */
static size_t seen_slots(const uint8_t *mask, size_t length, int32_t *slots) {
    size_t found = 0, at = 0;
    for (; at + 8 <= length; at += 8) {
        uint64_t eight;
        memcpy(&eight, mask + at, 8);
        eight |= eight >> 4, eight |= eight >> 2, eight |= eight >> 1; /* true is any byte but 0 */
        eight &= 0x0101010101010101ull;
        for (; eight; eight &= eight - 1) {
            slots[found++] = (int32_t)at + __builtin_ctzll(eight) / 8;
        }
    }
    for (; at < length; at++)
        if (mask[at]) slots[found++] = (int32_t)at;
    return found;
}

static void self_part(void *given, size_t part) {
    Call *call = given;
    size_t source = part / call->groups, group = part % call->groups, width = call->width, heads = call->heads;
    size_t first = heads * group / call->groups, end = heads * (group + 1) / call->groups;
    int64_t index = call->write_index[source];
    if (index < 0 || (size_t)index + call->beams > call->length) {
        call->failed = 1;
        return;
    }
    const float *rows = call->q + source * call->beams * 3 * heads * width;
    size_t cached = source_at(call->sources, source);
    for (size_t h = first; h < end; h++) {
        size_t place = ((cached * heads + h) * call->length + (size_t)index) * width;
        for (size_t k = 0; k < call->beams; k++) {
            const float *row = rows + k * 3 * heads * width + h * width;
            memcpy(call->new_keys + place + k * width, row + heads * width, width * sizeof(float));
            memcpy(call->new_values + place + k * width, row + 2 * heads * width, width * sizeof(float));
        }
    }
    int32_t *slots = scratch(SLOTS, (call->length + 8) * sizeof(int32_t));
    float *scores = scores_of(call->length + width + SLOTS_TOGETHER);
    for (size_t k = 0; k < call->beams; k++) {
        size_t row = source * call->beams + k;
        const uint8_t *mask = call->mask + (cached * call->beams + k) * call->length;
        size_t count = seen_slots(mask, call->length, slots);
        int none = !count;
        for (size_t i = 0; none && i < call->length; i++) slots[count++] = (int32_t)i;
        for (size_t h = first; h < end; h++) {
            size_t cache = (cached * heads + h) * call->length * width;
            kernels->attend_slots(rows + k * 3 * heads * width + h * width, none ? 0.0f : call->op->scale,
                                  call->new_keys + cache, call->new_values + cache, slots, count, width, scores,
                                  call->context + (row * heads + h) * width);
        }
    }
}

static size_t groups_of(const void *context, size_t sources, size_t heads, size_t work) {
    size_t most = work / least_work(context), wanted = (8 + sources - 1) / sources;
    if (sources * wanted > most) wanted = most / sources;
    if (wanted > heads) wanted = heads;
    return wanted ? wanted : 1;
}

/* What is too little for several threads is done by one. */
static Status run_parts(void *context, void (*body)(void *, size_t), size_t parts, size_t work, Call *call) {
    if (work >= 2 * least_work(context)) return in_parallel(context, body, parts, call);
    for (size_t i = 0; i < parts; i++) body(call, i);
    return NULL;
}

/* Whether something cached has the sources of a call, or more, of which it takes some. */
static int has_sources(const void *context, const Tensor *cached, const Tensor *call) {
    return sources_of(context) ? cached->dims[0] >= call->dims[0] : cached->dims[0] == call->dims[0];
}

static Status compute_self(void *kernel, void *context) {
    Attention *op = kernel;
    Tensor qkv, keys, values, index, mask;
    if (!input_of(context, 0, &qkv) || !input_of(context, 1, &keys) || !input_of(context, 2, &values) ||
        !input_of(context, 3, &index) || !input_of(context, 4, &mask) || qkv.rank != 3 || keys.rank != 4 ||
        mask.rank != 3 || qkv.dims[2] != 3 * keys.dims[1] * keys.dims[3] || !has_sources(context, &keys, &qkv) ||
        mask.dims[0] != keys.dims[0] || mask.dims[1] != qkv.dims[1] || mask.dims[2] != keys.dims[2] ||
        (int64_t)index.count != qkv.dims[0] || values.count != keys.count)
        return error_of(
            "SelfAttention: qkv [B,K,3HE], cache [B,H,L,E], write_index [B] and self_mask [B,K,L] do not fit");
    int64_t dims[] = {qkv.dims[0], qkv.dims[1], qkv.dims[2] / 3};
    Call call = {.op = op,
                 .q = qkv.data,
                 .write_index = index.data,
                 .sources = sources_of(context),
                 .mask = mask.data,
                 .beams = (size_t)qkv.dims[1],
                 .heads = (size_t)keys.dims[1],
                 .width = (size_t)keys.dims[3],
                 .length = (size_t)keys.dims[2]};
    call.context = output_of(context, 0, dims, 3);
    call.new_keys = output_of(context, 1, keys.dims, 4);
    call.new_values = output_of(context, 2, values.dims, 4);
    if (!qkv.dims[0]) return NULL; /* empty outputs have no memory */
    if (!call.context || !call.new_keys || !call.new_values) return error_of("SelfAttention: an output is missing");
    if (call.new_keys != keys.data) memcpy(call.new_keys, keys.data, keys.count * sizeof(float));
    if (call.new_values != values.data) memcpy(call.new_values, values.data, values.count * sizeof(float));
    size_t work = 2 * (size_t)qkv.dims[0] * call.beams * call.length * call.heads * call.width;
    call.groups = groups_of(context, (size_t)qkv.dims[0] ? (size_t)qkv.dims[0] : 1, call.heads, work);
    Status failed = run_parts(context, self_part, (size_t)qkv.dims[0] * call.groups, work, &call);
    if (!failed && call.failed) return error_of("SelfAttention: write_index is out of the cache");
    return failed;
}

/* One source's queries over keys that are stored by rows, for one head; `slots` are the places that are not masked. */
static void cross_rows(const Call *call, size_t head, const int32_t *slots, size_t count, int none, float *scores) {
    size_t width = call->width, stride = call->heads * width;
    size_t source = head / call->heads, h = head % call->heads;
    size_t keys = (source_at(call->sources, source) * call->heads + h) * call->length * width;
    for (size_t k = 0; k < call->beams; k++) {
        size_t row = (source * call->beams + k) * stride + h * width;
        kernels->attend_slots(call->q + row, none ? 0.0f : call->op->scale, call->keys + keys, call->values + keys,
                              slots, count, width, scores, call->context + row);
        if (!call->weights) continue;
        float *weights = call->weights + (head * call->beams + k) * call->length;
        memset(weights, 0, call->length * sizeof(float));
        for (size_t i = 0; i < count; i++) weights[slots[i]] = scores[i];
    }
}

static void cross_part(void *given, size_t part) {
    Call *call = given;
    size_t source = part / call->groups, group = part % call->groups, width = call->width, heads = call->heads;
    size_t first = heads * group / call->groups, end = heads * (group + 1) / call->groups, length = call->length;
    size_t encoded = source_at(call->sources, source);
    const uint8_t *mask = call->mask ? call->mask + encoded * length : NULL;
    float *scores = scores_of(call->beams * (length + width) + SLOTS_TOGETHER);
    int32_t *slots = call->op->transposed ? NULL : scratch(SLOTS, (length + 8) * sizeof(int32_t));
    size_t count = slots && mask ? seen_slots(mask, length, slots) : 0;
    int none = slots && mask && !count; /* all are masked, so all weigh the same */
    for (size_t s = 0; slots && (none || !mask) && s < length; s++) slots[count++] = (int32_t)s;
    for (size_t h = first; h < end; h++) {
        if (slots) {
            cross_rows(call, source * heads + h, slots, count, none, scores);
            continue;
        }
        size_t place = (encoded * heads + h) * length * width, row = (source * call->beams * heads + h) * width;
        kernels->attend_source(call->q + row, call->beams, heads * width, call->op->scale, call->keys + place,
                               call->values + place, mask, length, width, scores, call->context + row, heads * width);
        if (call->weights)
            memcpy(call->weights + (source * heads + h) * call->beams * length, scores,
                   call->beams * length * sizeof(float));
    }
}

static Status compute_cross(void *kernel, void *context) {
    Attention *op = kernel;
    Tensor q, keys, values, mask;
    int masked = input_of(context, 3, &mask);
    if (!input_of(context, 0, &q) || !input_of(context, 1, &keys) || !input_of(context, 2, &values) || q.rank != 3 ||
        keys.rank != 4 || values.rank != 4 || q.dims[2] != values.dims[1] * values.dims[3] ||
        !has_sources(context, &values, &q) || keys.dims[0] != values.dims[0] || keys.dims[1] != values.dims[1] ||
        keys.dims[2] != values.dims[op->transposed ? 3 : 2] || keys.dims[3] != values.dims[op->transposed ? 2 : 3] ||
        (masked && (int64_t)mask.count != values.dims[0] * values.dims[2]))
        return error_of("CrossAttention: q [B,K,HE], keys and values [B,H,S,E] and source_mask [B,S] do not fit");
    Call call = {.op = op,
                 .q = q.data,
                 .keys = keys.data,
                 .values = values.data,
                 .mask = masked ? mask.data : NULL,
                 .sources = sources_of(context),
                 .beams = (size_t)q.dims[1],
                 .heads = (size_t)values.dims[1],
                 .width = (size_t)values.dims[3],
                 .length = (size_t)values.dims[2]};
    call.context = output_of(context, 0, q.dims, 3);
    int64_t dims[] = {q.dims[0], values.dims[1], q.dims[1], values.dims[2]};
    call.weights = output_of(context, 1, dims, 4);
    size_t work = 2 * (size_t)q.dims[0] * call.beams * call.length * call.heads * call.width;
    call.groups = groups_of(context, (size_t)q.dims[0] ? (size_t)q.dims[0] : 1, call.heads, work);
    return run_parts(context, cross_part, (size_t)q.dims[0] * call.groups, work, &call);
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    (void)operator, (void)functions;
    Attention *op = calloc(1, sizeof *op);
    if (!op) return error_of("out of memory");
    op->heads = int_attribute(info, "heads", 1);
    op->transposed = int_attribute(info, "transposed", 0);
    op->scale = float_attribute(info, "scale", 1.0f);
    *kernel = op;
    return NULL;
}

Operator self_attention = {.called = "SelfAttention",
                           .inputs = "fffib",
                           .outputs = "fff",
                           .create_or_fail = create,
                           .compute_or_fail = compute_self,
                           .destroy = free};
Operator cross_attention = {.called = "CrossAttention",
                            .inputs = "fffB",
                            .outputs = "fF",
                            .create_or_fail = create,
                            .compute_or_fail = compute_cross,
                            .destroy = free};
