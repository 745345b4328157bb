/* Rows rounded to int8, and their products. Part of compute.h. */
static void round_rows(const float *x, size_t first, size_t end, size_t depth, const float *smoothing, Steps steps,
                       uint8_t *to, float *scale) {
    size_t stride = (depth + 3) / 4 * 4;
    const Floats step = vall(1.0f / (float)steps.above);
    const Ints zero = iall(steps.zero);
    for (size_t r = first; r < end; r++) {
        const float *row = x + r * depth;
        Floats most = vall(steps.is_signed ? 0.0f : -INFINITY);
        Floats wrong = vzero(); /* not a number where one of the row is not */
        for (size_t d = 0; d < depth; d += W) {
            size_t n = depth - d < W ? depth - d : W;
            Floats v = vload_part(row + d, n);
            if (smoothing) v = vmul(v, vload_part(smoothing + d, n));
            wrong = vadd(wrong, vsub(v, v));
            if (steps.is_signed)
                v = vabs(v);
            else if (n < W) { /* lanes behind the end are 0, which may not be in the row */
                float lanes[W];
                vstore(lanes, v);
                for (size_t i = n; i < W; i++) lanes[i] = lanes[0];
                v = vload(lanes);
            }
            most = vmax(most, v);
        }
        float m = vmost(most) + vsum(wrong);
        if (m < steps.least) m = steps.least;
        scale[r] = m;
        Floats all = vall(m);
        uint8_t *place = to + r * stride;
        for (size_t d = 0; d < depth; d += W) {
            size_t n = depth - d < W ? depth - d : W;
            Floats v = vload_part(row + d, n);
            if (smoothing) v = vmul(v, vload_part(smoothing + d, n));
            Floats counted = vdiv(vdiv(v, all), step);
            counted = vmin(vmax(counted, vall(-256.0f)), vall(256.0f)); /* a row of zeros divides by zero */
            Ints number = isub(vto_int(counted), isub(izero(), zero));
            if (n == W)
                store_bytes(place + d, number);
            else {
                uint8_t bytes[W];
                store_bytes(bytes, number);
                memcpy(place + d, bytes, n);
            }
        }
        memset(place + depth, 0, stride - depth);
    }
}

/* As float_tile, with sums of int8 products from quads of inputs; the first pair is number `half` of its panel. */
INLINE void int8_tile(const int rows, const int pairs, const Int8Rows *x, size_t row, const Int8Weights *w,
                      size_t panel, int half, Ahead ahead, float *y, size_t stride) {
    Ints sum[ROWS][4][2];
    size_t quads = x->quads, panel_size = quads * PANEL * 4, apart = PAIRS == 1 ? panel_size : PAIR * 4;
    const uint8_t *bytes = x->steps + row * quads * 4;
    const int8_t *weights = w->panels + panel * panel_size + half * PAIR * 4;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < pairs; p++) sum[r][p][0] = sum[r][p][1] = izero();
    for (size_t q = 0; q < quads; q++) {
        if (rows > 1) bring(ahead, q);
        UNROLL for (int p = 0; p < pairs; p++) {
            const int8_t *place = weights + p * apart + q * PANEL * 4;
            Ints low = iload(place), high = iload(place + W * 4);
            UNROLL for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, bytes + (r * quads + q) * 4, 4);
                Ints each = iall(four);
                sum[r][p][0] = idot(sum[r][p][0], each, low);
                sum[r][p][1] = idot(sum[r][p][1], each, high);
            }
        }
    }
    UNROLL for (int p = 0; p < pairs; p++) UNROLL for (int h = 0; h < 2; h++) {
        size_t column = panel * PANEL + (half + p) * PAIR + h * W;
        if (column >= w->columns) continue;
        size_t n = w->columns - column < W ? w->columns - column : W;
        Floats scale = vmul(vall(x->step), vload_part(w->scale + column, n));
        Ints zeros = imul(iall(x->zero), iload(w->sums + column)); /* sums have whole panels */
        UNROLL for (int r = 0; r < rows; r++) {
            Floats v = vmul(vmul(vto_float(isub(sum[r][p][h], zeros)), scale), vall(x->scale[row + r]));
            float *place = y + r * stride + p * PAIR + h * W;
            if (n == W)
                vstore(place, v);
            else
                vstore_part(place, v, n);
        }
    }
}

#define INT8_TILE(rows, pairs) int8_tile(rows, pairs, x, row, w, panel, half, ahead, y, stride)
static void int8_tiles(int rows, int pairs, const Int8Rows *x, size_t row, const Int8Weights *w, size_t panel, int half,
                       Ahead ahead, float *y, size_t stride) {
    if (pairs == 4)
        INT8_TILE(1, 4);
    else if (pairs == 2)
        INT8_TILE(1, 2);
    else
        switch (rows) {
            case 1: INT8_TILE(1, 1); break;
            case 2: INT8_TILE(2, 1); break;
            case 3: INT8_TILE(3, 1); break;
            case 4: INT8_TILE(4, 1); break;
            case 5: INT8_TILE(5, 1); break;
            case 6: INT8_TILE(6, 1); break;
#ifdef WITH_AVX512
            case 7: INT8_TILE(7, 1); break;
            case 8: INT8_TILE(8, 1); break;
            case 9: INT8_TILE(9, 1); break;
            case 10: INT8_TILE(10, 1); break;
            case 11: INT8_TILE(11, 1); break;
            default: INT8_TILE(12, 1); break;
#endif
        }
}

/* Panels first..end of the product, to columns 0.. of y [rows, stride]. */
static void int8_panels(const Int8Rows *x, size_t rows, const Int8Weights *w, size_t first, size_t end, float *y,
                        size_t stride) {
    size_t tiles = (rows + ROWS - 1) / ROWS * PAIRS, size = x->quads * PANEL * 4;
    for (size_t p = first; p < end;) {
        int pairs = rows == 1 ? pairs_of(1, end - p) : 1;
        size_t together = PAIRS == 1 ? (size_t)pairs : 1, count, tile = 0; /* panels */
        const int8_t *panel = w->panels + p * size, *next = p + together < end ? panel + size : NULL;
        for (size_t r = 0; r < rows; r += count) {
            count = tile_rows(rows, rows - r);
            for (int h = 0; h < PAIRS; h += PAIRS == 1 ? 1 : pairs) {
                Ahead ahead = share_ahead(next, panel, size, tile++, tiles, x->quads);
                int8_tiles((int)count, pairs, x, r, w, p, h, ahead,
                           y + r * stride + (p - first) * PANEL + h * PAIR, stride);
            }
        }
        p += together;
    }
}

static void int8_product(const Int8Rows *x, size_t rows, const Int8Weights *w, size_t first, size_t end,
                         const Epilogue *then, float *y) {
    size_t columns = w->columns;
    for (size_t p = first; p < end; p += TOGETHER) {
        size_t next = p + TOGETHER < end ? p + TOGETHER : end;
        int8_panels(x, rows, w, p, next, y + p * PANEL, columns);
        finish(then, rows, columns, p * PANEL, next * PANEL < columns ? next * PANEL : columns, y);
    }
}
