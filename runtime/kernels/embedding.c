/* Embedding, EmbeddingInt8: rows of a table, times a factor, and rows of a table of positions added to them.

       tokens [B,Q] -> table [V,D] (times a row's scale in int8) - times factor - plus positions [P,D] at place [B or 1,
   Q or 1], or [B]; without one at the token's column -> y [B,Q,D]

   The output projection may have the same table, packed: its numbers are then read there, so that no second copy is in
   memory. Rows of a table in a mapped file are read from the file: the system would map 64 KB and more around each.
   Every number is rounded as separate operators of ONNX round it. */
#include <stdlib.h>

#include "operators.h"

enum { TOKENS, TABLE, SCALE, POSITIONS, PLACE };
enum { ROW_BLOCK = 32 };

typedef struct {
    Weights packed; /* of an operator of the same memory, as soon as it is there */
    int stored_int8;
    float factor;
} Embedding;

typedef struct {
    const int64_t *tokens, *places;
    const void *table;
    const Packed *packed;
    int file; /* that the table is in; -1: read it in memory */
    int64_t offset;
    const float *scale, *positions;
    float *y, factor;
    size_t rows, depth, vocab, queries, place_sources, place_queries;
    int64_t last_position;
    int stored_int8, failed;
} Call;

static const void *stored_row(const Call *call, size_t token) {
    size_t size = call->depth * (call->stored_int8 ? 1 : sizeof(float));
    void *row = call->file < 0 ? NULL : scratch(STORED_ROW, size);
    if (row && read_file(call->file, call->offset + (int64_t)(token * size), row, size)) return row;
    return (const char *)call->table + token * size;
}

/* Number d of a token's row is at places first + d * step, of floats; of int8 so are fours of them. */
static void copy_floats(const Call *call, size_t token, float *y) {
    size_t step = call->packed ? PANEL : 1;
    const float *row = call->packed ? call->packed->floats + token / PANEL * PANEL * call->depth + token % PANEL
                                    : stored_row(call, token);
    for (size_t d = 0; d < call->depth; d++) y[d] = row[d * step] * call->factor;
}

static void copy_int8(const Call *call, size_t token, float *y) {
    size_t step = call->packed ? PANEL * 4 : 4, panel = PANEL * ((call->depth + 3) / 4 * 4);
    const int8_t *row = call->packed ? call->packed->int8.panels + token / PANEL * panel + token % PANEL * 4
                                     : stored_row(call, token);
    float scale = call->scale[token];
    for (size_t d = 0; d < call->depth; d++) y[d] = (float)row[d / 4 * step + d % 4] * scale * call->factor;
}

static void embed_part(void *given, size_t part) {
    Call *call = given;
    size_t end = (part + 1) * ROW_BLOCK < call->rows ? (part + 1) * ROW_BLOCK : call->rows;
    for (size_t r = part * ROW_BLOCK; r < end; r++) {
        size_t source = r / call->queries, query = r % call->queries;
        int64_t token = call->tokens[r], place = 0;
        if (call->positions) {
            size_t row = call->place_sources > 1 ? source : 0, column = call->place_queries > 1 ? query : 0;
            place = call->places ? call->places[row * call->place_queries + column] : (int64_t)query;
        }
        if (token < 0 || (size_t)token >= call->vocab || place < 0 || place > call->last_position) {
            call->failed = 1;
            return;
        }
        float *y = call->y + r * call->depth;
        if (call->stored_int8)
            copy_int8(call, (size_t)token, y);
        else
            copy_floats(call, (size_t)token, y);
        const float *added = call->positions ? call->positions + (size_t)place * call->depth : NULL;
        for (size_t d = 0; added && d < call->depth; d++) y[d] += added[d];
    }
}

static Status compute(void *kernel, void *context) {
    Embedding *op = kernel;
    Tensor tokens, table, positions, place;
    int has_positions = input_of(context, POSITIONS, &positions), placed = input_of(context, PLACE, &place);
    if (!input_of(context, TOKENS, &tokens) || !input_of(context, TABLE, &table) || tokens.rank != 2 ||
        table.rank != 2 || (op->stored_int8 && !floats_of(context, SCALE)) ||
        !input_has(context, SCALE, (size_t)table.dims[0]) ||
        (has_positions && (positions.rank != 2 || positions.dims[1] != table.dims[1])) ||
        (placed && (!has_positions || place.rank < 1 || place.rank > 2)))
        return error_of("Embedding: tokens [B,Q], table [V,D], positions [P,D] and their places do not fit");
    int64_t dims[] = {tokens.dims[0], tokens.dims[1], table.dims[1]};
    Call call = {.tokens = tokens.data,
                 .table = table.data,
                 .scale = floats_of(context, SCALE),
                 .factor = op->factor,
                 .rows = tokens.count,
                 .depth = (size_t)table.dims[1],
                 .vocab = (size_t)table.dims[0],
                 .queries = (size_t)tokens.dims[1],
                 .stored_int8 = op->stored_int8,
                 .file = -1};
    call.y = output_of(context, 0, dims, 3);
    if (!call.rows) return NULL; /* empty outputs have no memory */
    if (has_positions) call.positions = positions.data, call.last_position = positions.dims[0] - 1;
    if (placed) {
        call.places = place.data;
        call.place_sources = (size_t)place.dims[0], call.place_queries = place.rank == 2 ? (size_t)place.dims[1] : 1;
        if ((call.place_sources != 1 && place.dims[0] != tokens.dims[0]) ||
            (call.place_queries != 1 && place.dims[1] != tokens.dims[1]))
            return error_of("Embedding: places of positions are neither one for all tokens nor one for each");
    }
    call.packed = packed_elsewhere(&op->packed, table.data, call.depth, call.vocab,
                                   op->stored_int8 ? INT8_PANELS : FLOAT_PANELS);
    size_t size = table.count * (op->stored_int8 ? 1 : sizeof(float));
    if (!call.packed) call.file = mapped_file(table.data, size, &call.offset);
    Status failed = NULL;
    size_t parts = (call.rows + ROW_BLOCK - 1) / ROW_BLOCK;
    if (call.rows * call.depth >= least_work(context))
        failed = in_parallel(context, embed_part, parts, &call);
    else
        for (size_t i = 0; i < parts; i++) embed_part(&call, i);
    if (!failed && call.failed) return error_of("Embedding: a token or a position is not in its table");
    return failed;
}

static Status create(const Operator *operator, Functions functions, const void *info, void **kernel) {
    (void)functions;
    Embedding *op = calloc(1, sizeof *op);
    if (!op) return error_of("out of memory");
    op->stored_int8 = operator == &embedding_int8;
    op->factor = float_attribute(info, "factor", 1.0f);
    *kernel = op;
    return NULL;
}

static void destroy(void *kernel) {
    give_back(((Embedding *)kernel)->packed.packed);
    free(kernel);
}

Operator embedding = {.called = "Embedding",
                      .inputs = "ifFFI",
                      .outputs = "f",
                      .create_or_fail = create,
                      .compute_or_fail = compute,
                      .destroy = destroy};
Operator embedding_int8 = {.called = "EmbeddingInt8",
                           .inputs = "icFFI",
                           .outputs = "f",
                           .create_or_fail = create,
                           .compute_or_fail = compute,
                           .destroy = destroy};
