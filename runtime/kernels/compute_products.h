/* Products in fp32: tiles of rows and panels, and what follows them. Part of compute.h. */
enum { PAIR = 2 * W, PAIRS = PANEL / PAIR }; /* outputs of two vectors, and how often a panel has them */
enum { TOGETHER = 4 };                       /* panels that are finished while they are in the cache */
enum { FEW = W == 16 ? 6 : 3 };              /* rows that are multiplied as fast as memory is read, in one go */

/* Weights that are multiplied next. Each tile of the current ones has a share of them brought to the cache, while it
   computes: otherwise the first of the next tiles would wait for memory, and the others would not use it. */
typedef struct {
    const char *from;
    size_t step; /* bytes for each input, or each four of them in int8 */
} Ahead;

INLINE void bring(Ahead ahead, size_t number) {
    __builtin_prefetch(ahead.from + number * ahead.step, 0, 2);
    if (ahead.step > 64) __builtin_prefetch(ahead.from + number * ahead.step + 64, 0, 2);
}

/* The share of tile `tile` of `tiles`, in `bytes` that begin at `next`; nothing to bring: `here` is in the cache. */
INLINE Ahead share_ahead(const void *next, const void *here, size_t bytes, size_t tile, size_t tiles, size_t inputs) {
    if (!next) return (Ahead){here, 0};
    size_t share = (bytes + tiles - 1) / tiles;
    return (Ahead){(const char *)next + tile * share, (share + inputs - 1) / inputs};
}

/* What a tile reads: floats; words of 16 bits; or words that it writes as floats, for the tiles of other rows. */
enum Kind { FLOATS, WORDS, UNPACKED_WORDS };

INLINE Floats weights_at(const enum Kind kind, const void *w, size_t place, float *unpacked) {
    if (kind == FLOATS) return vload((const float *)w + place);
    Floats v = vfrom_words((const int16_t *)w + place);
    if (kind == UNPACKED_WORDS) vstore(unpacked + place, v);
    return v;
}

/* A tile of `rows` x `pairs` of vectors, which are `apart` in w: sums over inputs from..to, added to what y has unless
   `from` is 0. w begins with the weights of input `from`. */
INLINE void float_tile(const enum Kind kind, const int rows, const int pairs, const float *x, size_t depth, size_t from,
                       size_t to, const void *w, size_t apart, float *unpacked, Ahead ahead, float *y, size_t stride) {
    Floats sum[ROWS][4][2];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < pairs; p++) sum[r][p][0] = sum[r][p][1] = vzero();
    for (size_t d = from; d < to; d++) {
        if (rows > (kind == FLOATS ? FEW : 1)) bring(ahead, d - from);
        UNROLL for (int p = 0; p < pairs; p++) {
            size_t place = p * apart + (d - from) * PANEL;
            Floats low = weights_at(kind, w, place, unpacked), high = weights_at(kind, w, place + W, unpacked);
            UNROLL for (int r = 0; r < rows; r++) {
                Floats each = vall(x[r * depth + d]);
                sum[r][p][0] = vfma(each, low, sum[r][p][0]);
                sum[r][p][1] = vfma(each, high, sum[r][p][1]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < pairs; p++) UNROLL for (int h = 0; h < 2; h++) {
        float *to_store = y + r * stride + p * PAIR + h * W;
        vstore(to_store, from ? vadd(vload(to_store), sum[r][p][h]) : sum[r][p][h]);
    }
}

#define FLOAT_TILE(rows, pairs) \
    float_tile(kind, rows, pairs, x, depth, from, to, w, apart, unpacked, ahead, y, stride)
INLINE void tiles_of(const enum Kind kind, int rows, int pairs, const float *x, size_t depth, size_t from, size_t to,
                     const void *w, size_t apart, float *unpacked, Ahead ahead, float *y, size_t stride) {
    if (pairs == 4)
        FLOAT_TILE(1, 4);
    else if (pairs == 2)
        switch (rows) {
            case 1: FLOAT_TILE(1, 2); break;
            case 2: FLOAT_TILE(2, 2); break;
            default: FLOAT_TILE(3, 2); break;
        }
    else
        switch (rows) {
            case 1: FLOAT_TILE(1, 1); break;
            case 2: FLOAT_TILE(2, 1); break;
            case 3: FLOAT_TILE(3, 1); break;
            case 4: FLOAT_TILE(4, 1); break;
            case 5: FLOAT_TILE(5, 1); break;
            case 6: FLOAT_TILE(6, 1); break;
#ifdef WITH_AVX512
            case 7: FLOAT_TILE(7, 1); break;
            case 8: FLOAT_TILE(8, 1); break;
            case 9: FLOAT_TILE(9, 1); break;
            case 10: FLOAT_TILE(10, 1); break;
            case 11: FLOAT_TILE(11, 1); break;
            default: FLOAT_TILE(12, 1); break;
#endif
        }
}

static void float_tiles(enum Kind kind, int rows, int pairs, const float *x, size_t depth, size_t from, size_t to,
                        const void *w, size_t apart, float *unpacked, Ahead ahead, float *y, size_t stride) {
    switch (kind) {
        case FLOATS: tiles_of(FLOATS, rows, pairs, x, depth, from, to, w, apart, NULL, ahead, y, stride); break;
        case WORDS: tiles_of(WORDS, rows, pairs, x, depth, from, to, w, apart, NULL, ahead, y, stride); break;
        default: tiles_of(UNPACKED_WORDS, rows, pairs, x, depth, from, to, w, apart, unpacked, ahead, y, stride);
    }
}

/* Pairs of vectors that are multiplied together, so that few rows have many sums: of several panels, or of one whose
   pairs would be read one after the other. */
INLINE int pairs_of(size_t rows, size_t panels_left) {
    if (PAIRS == 2) return rows <= 3 ? 2 : 1;
    int most = rows == 1 ? 4 : rows <= 3 ? 2 : 1;
    return panels_left >= (size_t)most ? most : panels_left >= 2 && most >= 2 ? 2 : 1;
}

INLINE size_t tile_rows(size_t rows, size_t left) { /* rows in tiles of nearly the same size */
    size_t tiles = (rows + ROWS - 1) / ROWS, even = (rows + tiles - 1) / tiles;
    return left < even ? left : even;
}

INLINE Floats activated(Floats v, enum Activation activation) {
    switch (activation) {
        case RELU: return vmax(vzero(), v); /* v where it is not a number */
        case GELU: return vgelu(v);
        case SILU: return vsilu(v);
        default: return v;
    }
}

/* Bias, activation and residual of columns first..end. */
static void finish(const Epilogue *then, size_t rows, size_t columns, size_t first, size_t end, float *y) {
    if (!then->bias && !then->residual && then->activation == NO_ACTIVATION) return;
    for (size_t r = 0; r < rows; r++) {
        for (size_t c = first; c < end; c += W) {
            size_t n = end - c < W ? end - c : W;
            float *place = y + r * columns + c;
            Floats v = vload_part(place, n);
            if (then->bias) v = vadd(v, vload_part(then->bias + c, n));
            v = activated(v, then->activation);
            if (then->residual) v = vadd(vload_part(then->residual + r * columns + c, n), v);
            vstore_part(place, v, n);
        }
    }
}

/* Panels first..end of the product, to columns 0.. of y [rows, stride]. Of words that several tiles read, the first one
   makes floats. */
INLINE void panels_of(const enum Kind kind, const float *x, size_t rows, size_t depth, const void *panels,
                      size_t columns, size_t first, size_t end, float *y, size_t stride) {
    float part[ROWS * PANEL], unpacked[kind == FLOATS ? 1 : DEPTH * PANEL];
    size_t panel_size = depth * PANEL, whole = columns / PANEL < end ? columns / PANEL : end;
    size_t tiles = (rows + ROWS - 1) / ROWS * PAIRS, size = kind == FLOATS ? sizeof(float) : sizeof(int16_t);
    for (size_t p = first; p < end;) {
        int pairs = p < whole ? pairs_of(rows, whole - p) : 1;
        size_t together = PAIRS == 1 ? (size_t)pairs : 1; /* panels */
        for (size_t from = 0; from < depth; from += DEPTH) {
            size_t to = from + DEPTH < depth ? from + DEPTH : depth, numbers = (to - from) * PANEL;
            size_t count, tile = 0;
            const char *block = (const char *)panels + (p * panel_size + from * PANEL) * size;
            const char *next = to == depth && p + together >= end ? NULL : block + numbers * size;
            for (size_t r = 0; r < rows; r += count) {
                enum Kind now = kind == FLOATS || r ? FLOATS : rows > ROWS ? UNPACKED_WORDS : WORDS;
                count = tile_rows(rows, rows - r);
                for (int h = 0; h < PAIRS; h += PAIRS == 1 ? 1 : pairs) {
                    Ahead ahead = share_ahead(next, block, numbers * size, tile++, tiles, to - from);
                    float *floats = unpacked + h * PAIR;
                    const void *w = kind != FLOATS && r ? (const void *)floats : block + h * PAIR * size;
                    size_t column = p * PANEL + h * PAIR, left = column < columns ? columns - column : 0;
                    float *place = y + r * stride + column - first * PANEL;
                    if (left >= PAIR) {
                        float_tiles(now, (int)count, pairs, x + r * depth, depth, from, to, w,
                                    PAIRS == 1 ? panel_size : PAIR, floats, ahead, place, stride);
                        continue;
                    }
                    for (size_t i = 0; from && i < count; i++)
                        memcpy(part + i * PANEL, place + i * stride, left * sizeof(float));
                    float_tiles(now, (int)count, 1, x + r * depth, depth, from, to, w, 0, floats, ahead, part, PANEL);
                    for (size_t i = 0; i < count; i++)
                        memcpy(place + i * stride, part + i * PANEL, left * sizeof(float));
                }
            }
        }
        p += together;
    }
}

static void float_panels(const float *x, size_t rows, size_t depth, const float *panels, size_t columns, size_t first,
                         size_t end, float *y, size_t stride) {
    panels_of(FLOATS, x, rows, depth, panels, columns, first, end, y, stride);
}

static void word_panels(const float *x, size_t rows, const WordWeights *w, size_t first, size_t end, float *y,
                        size_t stride) {
    panels_of(WORDS, x, rows, w->depth, w->panels, w->columns, first, end, y, stride);
}

static void float_product(const float *x, size_t rows, size_t depth, const float *panels, size_t columns, size_t first,
                          size_t end, const Epilogue *then, float *y) {
    for (size_t p = first; p < end; p += TOGETHER) {
        size_t next = p + TOGETHER < end ? p + TOGETHER : end;
        float_panels(x, rows, depth, panels, columns, p, next, y + p * PANEL, columns);
        finish(then, rows, columns, p * PANEL, next * PANEL < columns ? next * PANEL : columns, y);
    }
}
