/* Products in fp32: tiles of rows and panels, and what follows them. Part of compute.h. */
enum { PAIR = 2 * W, PAIRS = PANEL / PAIR }; /* outputs of a tile, and tiles of a panel */
enum { TOGETHER = 4 };                       /* panels that are finished while they are in the cache */

/* A tile of `rows` x `panels` * 2 vectors: sums over inputs from..to, added to what y has unless `from` is 0. */
INLINE void float_tile(const int rows, const int panels, const float *x, size_t depth, size_t from, size_t to,
                       const float *w, size_t panel_size, float *y, size_t stride) {
    Floats sum[ROWS][4][2];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++) sum[r][p][0] = sum[r][p][1] = vzero();
    for (size_t d = from; d < to; d++) {
        UNROLL for (int p = 0; p < panels; p++) {
            const float *row = w + p * panel_size + d * PANEL;
            Floats low = vload(row), high = vload(row + W);
            UNROLL for (int r = 0; r < rows; r++) {
                Floats each = vall(x[r * depth + d]);
                sum[r][p][0] = vfma(each, low, sum[r][p][0]);
                sum[r][p][1] = vfma(each, high, sum[r][p][1]);
            }
        }
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < panels; p++) UNROLL for (int h = 0; h < 2; h++) {
        float *to_store = y + r * stride + p * PANEL + h * W;
        vstore(to_store, from ? vadd(vload(to_store), sum[r][p][h]) : sum[r][p][h]);
    }
}

#define FLOAT_TILE(rows, panels) float_tile(rows, panels, x, depth, from, to, w, panel_size, y, stride)
static void float_tiles(int rows, int panels, const float *x, size_t depth, size_t from, size_t to, const float *w,
                        size_t panel_size, float *y, size_t stride) {
    if (panels == 4)
        FLOAT_TILE(1, 4);
    else if (panels == 2)
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

INLINE int panels_of(size_t rows, size_t left) { /* that are multiplied together, so that few rows have many sums */
    int most = rows == 1 ? 4 : rows <= (W == 16 ? 3 : 1) ? 2 : 1;
    return left >= (size_t)most ? most : left >= 2 && most >= 2 ? 2 : 1;
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

/* Panels first..end of the product, to columns 0.. of y [rows, stride]. */
static void float_panels(const float *x, size_t rows, size_t depth, const float *panels, size_t columns, size_t first,
                         size_t end, float *y, size_t stride) {
    float part[ROWS * PANEL];
    size_t panel_size = depth * PANEL, whole = columns / PANEL < end ? columns / PANEL : end;
    for (size_t p = first; p < end;) {
        int together = PAIRS == 1 && p < whole ? panels_of(rows, whole - p) : 1;
        for (size_t from = 0; from < depth; from += DEPTH) {
            size_t to = from + DEPTH < depth ? from + DEPTH : depth, count;
            for (size_t r = 0; r < rows; r += count) {
                count = tile_rows(rows, rows - r);
                for (int h = 0; h < PAIRS; h++) {
                    const float *w = panels + p * panel_size + h * PAIR;
                    size_t column = p * PANEL + h * PAIR, left = column < columns ? columns - column : 0;
                    float *place = y + r * stride + column - first * PANEL;
                    if (left >= PAIR) {
                        float_tiles((int)count, together, x + r * depth, depth, from, to, w, panel_size, place, stride);
                        continue;
                    }
                    for (size_t i = 0; from && i < count; i++)
                        memcpy(part + i * PANEL, place + i * stride, left * sizeof(float));
                    float_tiles((int)count, 1, x + r * depth, depth, from, to, w, panel_size, part, PANEL);
                    for (size_t i = 0; i < count; i++)
                        memcpy(place + i * stride, part + i * PANEL, left * sizeof(float));
                }
            }
        }
        p += together;
    }
}

static void float_product(const float *x, size_t rows, size_t depth, const float *panels, size_t columns, size_t first,
                          size_t end, const Epilogue *then, float *y) {
    for (size_t p = first; p < end; p += TOGETHER) {
        size_t next = p + TOGETHER < end ? p + TOGETHER : end;
        float_panels(x, rows, depth, panels, columns, p, next, y + p * PANEL, columns);
        finish(then, rows, columns, p * PANEL, next * PANEL < columns ? next * PANEL : columns, y);
    }
}
