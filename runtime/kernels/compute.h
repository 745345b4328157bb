/* The kernels, written once for vectors of any width; compute_avx2.c and compute_avx512.c include this file. */
#include <math.h>
#include <string.h>

#include "kernels.h"
#include "vectors.h"

#include "compute_products.h"
#include "compute_int8.h"
#include "compute_ranking.h"
#include "compute_attention.h"

static void multiply(const float *a, const float *b, size_t count, float *to) {
    for (size_t i = 0; i < count; i += W) {
        size_t n = count - i < W ? count - i : W;
        vstore_part(to + i, vmul(vload_part(a + i, n), vload_part(b + i, n)), n);
    }
}

static void normalise(float *rows, size_t first, size_t end, size_t columns, const float *weight, const float *bias,
                      float epsilon, int rms) {
    for (size_t r = first; r < end; r++) {
        float *row = rows + r * columns;
        Floats sum = vzero(), squares = vzero();
        for (size_t c = 0; !rms && c < columns; c += W)
            sum = vadd(sum, vload_part(row + c, columns - c < W ? columns - c : W));
        float mean = vsum(sum) / (float)columns;
        for (size_t c = 0; c < columns; c += W) {
            size_t n = columns - c < W ? columns - c : W;
            float lanes[W];
            Floats v = vsub(vload_part(row + c, n), vall(mean));
            if (n < W) { /* lanes behind the end are no numbers of the row */
                vstore(lanes, vzero());
                vstore_part(lanes, v, n);
                v = vload(lanes);
            }
            squares = vfma(v, v, squares);
        }
        float factor = 1.0f / sqrtf(vsum(squares) / (float)columns + epsilon);
        for (size_t c = 0; c < columns; c += W) {
            size_t n = columns - c < W ? columns - c : W;
            Floats v = vmul(vsub(vload_part(row + c, n), vall(mean)), vall(factor));
            if (weight) v = vmul(v, vload_part(weight + c, n));
            if (bias) v = vadd(v, vload_part(bias + c, n));
            vstore_part(row + c, v, n);
        }
    }
}

const Kernels KERNELS = {
    .width = W,
    .float_product = float_product,
    .float_panels = float_panels,
    .word_panels = word_panels,
    .round_rows = round_rows,
    .int8_product = int8_product,
    .int8_panels = int8_panels,
    .normalise = normalise,
    .gathered_products = gathered_products,
    .multiply = multiply,
    .rank = rank,
    .reaching_tokens = reaching_tokens,
    .largest = largest,
    .attend_slots = attend_slots,
    .attend_source = attend_source,
    .attend_panels = attend_panels,
};
