/* Only processors with AVX2 get here (library.c). */
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include "packing.h"

#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

static Packed *all;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;

enum { LARGE_PAGE = 1 << 21, LARGE = 4 * LARGE_PAGE /* what the rest of its last page hardly adds to */ };

static void *reserved(size_t bytes) {
    size_t unit = bytes >= LARGE ? LARGE_PAGE : 64;
    void *memory = aligned_alloc(unit, (bytes + unit - 1) / unit * unit);
    if (!memory) abort();
#ifdef MADV_HUGEPAGE
    if (bytes >= LARGE) madvise(memory, bytes, MADV_HUGEPAGE); /* fewer misses of the address tables */
#endif
    return memory;
}

typedef struct Mapped {
    uintptr_t start, end;
    struct Mapped *next;
} Mapped;
static Mapped *files;

void note_mapped(const void *start, size_t size, int mapped) {
    uintptr_t place = (uintptr_t)start;
    pthread_mutex_lock(&lock);
    if (mapped) {
        Mapped *file = malloc(sizeof *file);
        if (!file) abort();
        *file = (Mapped){place, place + size, files};
        files = file;
    } else {
        for (Packed *packed = all; packed; packed = packed->next) /* another file may come to lie there */
            if ((uintptr_t)packed->key >= place && (uintptr_t)packed->key < place + size) packed->key = NULL;
        for (Mapped **one = &files; *one; one = &(*one)->next)
            if ((*one)->start == place && (*one)->end == place + size) {
                Mapped *gone = *one;
                *one = gone->next;
                free(gone);
                break;
            }
    }
    pthread_mutex_unlock(&lock);
}

/* Drops the pages of weights that are packed now, if they lie in a mapped file. */
static void drop_pages(const void *weights, size_t size) {
#ifdef MADV_DONTNEED
    uintptr_t page = 4096, start = ((uintptr_t)weights + page - 1) / page * page,
              end = ((uintptr_t)weights + size) / page * page;
    pthread_mutex_lock(&lock);
    for (Mapped *file = files; file && start < end; file = file->next)
        if (file->start <= start && end <= file->end) {
            madvise((void *)start, end - start, MADV_DONTNEED);
            break;
        }
    pthread_mutex_unlock(&lock);
#else
    (void)weights, (void)size;
#endif
}

/* The same for panels of a table that is stored by rows, when another DROPPED of them are packed. */
static void drop_rows(const void *weights, size_t row_bytes, size_t panel, size_t panels) {
    enum { DROPPED = 64 };
    size_t from = panel / DROPPED * DROPPED;
    if (panel + 1 == panels || (panel + 1) % DROPPED == 0)
        drop_pages((const char *)weights + from * PANEL * row_bytes, (panel + 1 - from) * PANEL * row_bytes);
}

static size_t panels_of(size_t columns) { return (columns + PANEL - 1) / PANEL; }

static void pack_floats(Packed *made, const float *weights, int by_rows) {
    size_t depth = made->depth, columns = made->columns, panels = panels_of(columns);
    made->floats = reserved(panels * depth * PANEL * sizeof(float));
    for (size_t p = 0; p < panels; p++) {
        size_t first = p * PANEL, count = columns - first < PANEL ? columns - first : PANEL;
        float *panel = made->floats + p * depth * PANEL;
        if (count < PANEL) memset(panel, 0, depth * PANEL * sizeof(float));
        for (size_t d = 0; !by_rows && d < depth; d++)
            memcpy(panel + d * PANEL, weights + d * columns + first, count * sizeof(float));
        for (size_t d = 0; by_rows && d < depth; d++)
            for (size_t c = 0; c < count; c++) panel[d * PANEL + c] = weights[(first + c) * depth + d];
        if (by_rows) drop_rows(weights, depth * sizeof(float), p, columns / PANEL);
    }
}

/* One panel [quads][32][4] of 32 outputs or fewer, and the sums of their weights. */
static void pack_panel(int8_t *panel, int32_t *sums, const int8_t *weights, size_t depth, size_t columns, size_t first,
                       size_t count, int by_rows) {
    size_t quads = (depth + 3) / 4;
    if (count < PANEL || depth % 4) memset(panel, 0, quads * PANEL * 4);
    if (by_rows) {
        for (size_t c = 0; c < count; c++) {
            const int8_t *row = weights + (first + c) * depth;
            for (size_t d = 0; d + 4 <= depth; d += 4) memcpy(panel + (d * PANEL) + c * 4, row + d, 4);
            for (size_t d = depth / 4 * 4; d < depth; d++) panel[(d / 4 * PANEL + c) * 4 + d % 4] = row[d];
        }
    } else {
        for (size_t d = 0; d < depth; d++) {
            const int8_t *row = weights + d * columns + first;
            int8_t *place = panel + d / 4 * PANEL * 4 + d % 4;
            for (size_t c = 0; c < count; c++) place[c * 4] = row[c];
        }
    }
    for (size_t c = 0; c < PANEL; c++) sums[c] = 0;
    for (size_t q = 0; q < quads; q++)
        for (size_t c = 0; c < PANEL; c++) {
            const int8_t *four = panel + (q * PANEL + c) * 4;
            sums[c] += four[0] + four[1] + four[2] + four[3];
        }
}

static void pack_int8(Packed *made, const int8_t *weights, const float *scale, int by_rows) {
    size_t depth = made->depth, columns = made->columns, panels = panels_of(columns),
           size = (depth + 3) / 4 * 4 * PANEL;
    int8_t *to = reserved(panels * size);
    int32_t *sums = reserved(panels * PANEL * sizeof(int32_t));
    for (size_t p = 0; p < panels; p++) {
        size_t first = p * PANEL, count = columns - first < PANEL ? columns - first : PANEL;
        pack_panel(to + p * size, sums + first, weights, depth, columns, first, count, by_rows);
        if (by_rows) drop_rows(weights, depth, p, columns / PANEL);
    }
    made->scale = reserved(columns * sizeof(float));
    memcpy(made->scale, scale, columns * sizeof(float));
    made->int8 = (Int8Weights){to, made->scale, sums, depth, columns};
}

enum { LANES = 16 }; /* sums that run side by side, so that the compiler makes vectors of them */

/* The largest magnitude; infinity where a number is none. By their bits: those of larger magnitudes are larger. */
static float largest_of(const float *numbers, size_t count) {
    uint32_t most = 0, infinite = 0x7F800000;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, numbers + i, sizeof bits);
        bits &= 0x7FFFFFFF;
        most = bits > most ? bits : most;
    }
    most = most < infinite ? most : infinite;
    float largest;
    memcpy(&largest, &most, sizeof largest);
    return largest;
}

/* Numbers of at most 127 steps -> the nearest step: adding 1.5 * 2^23 leaves integers in the lowest bits. */
static void round_steps(const float *numbers, float inverse, size_t count, int8_t *steps) {
    for (size_t i = 0; i < count; i++) {
        float shifted = numbers[i] * inverse + 12582912.0f;
        int32_t bits;
        memcpy(&bits, &shifted, sizeof bits);
        steps[i] = (int8_t)(bits - 0x4B400000);
    }
}

/* At least the length of numbers - scale * steps; no steps: of the numbers themselves. */
static float length_of(const float *numbers, const int8_t *steps, float scale, size_t count) {
    float sums[LANES] = {0};
    size_t i = 0;
    for (; i + LANES <= count; i += LANES)
        for (size_t j = 0; j < LANES; j++) {
            float missed = steps ? numbers[i + j] - scale * (float)steps[i + j] : numbers[i + j];
            sums[j] += missed * missed;
        }
    double sum = 0;
    for (; i < count; i++) {
        float missed = steps ? numbers[i] - scale * (float)steps[i] : numbers[i];
        sum += (double)missed * missed;
    }
    for (size_t j = 0; j < LANES; j++) sum += sums[j];
    return (float)(sqrt(sum) * (1 + (double)count * 0x1p-23)); /* sums and differences in float err less than that */
}

/* Rounds output `column` to steps of its own scale: `row` [D]. */
static void round_column(Packed *made, const float *weights, size_t column, int by_rows, int most, float *copy,
                         int8_t *row) {
    size_t depth = made->depth;
    const float *numbers = weights + column * depth;
    if (!by_rows) {
        for (size_t d = 0; d < depth; d++) copy[d] = weights[d * made->columns + column];
        numbers = copy;
    }
    float largest = largest_of(numbers, depth), scale = largest > 0 ? largest / (float)most : 1.0f;
    made->finite &= largest < INFINITY;
    made->scale[column] = scale;
    round_steps(numbers, 1.0f / scale, depth, row);
    if (made->form != SCREENING) return;
    made->wrong[column] = length_of(numbers, row, scale, depth);
    made->norms[column] = length_of(numbers, NULL, 0, depth);
}

static void pack_rounded(Packed *made, const float *weights, int by_rows, int most) {
    size_t depth = made->depth, columns = made->columns, panels = panels_of(columns),
           size = (depth + 3) / 4 * 4 * PANEL;
    int8_t *to = reserved(panels * size), *rows = malloc(PANEL * depth);
    int32_t *sums = reserved(panels * PANEL * sizeof(int32_t));
    float *copy = malloc(depth * sizeof(float));
    if (!rows || !copy) abort();
    made->scale = reserved(columns * sizeof(float));
    if (made->form == SCREENING) {
        made->wrong = reserved(columns * sizeof(float));
        made->norms = reserved(columns * sizeof(float));
    }
    made->finite = 1;
    for (size_t p = 0; p < panels; p++) {
        size_t first = p * PANEL, count = columns - first < PANEL ? columns - first : PANEL;
        for (size_t c = 0; c < count; c++)
            round_column(made, weights, first + c, by_rows, most, copy, rows + c * depth);
        pack_panel(to + p * size, sums + first, rows, depth, columns, 0, count, 1);
        if (by_rows) drop_rows(weights, depth * sizeof(float), p, columns / PANEL);
    }
    free(rows);
    free(copy);
    made->int8 = (Int8Weights){to, made->scale, sums, depth, columns};
}

static Packed *find(const void *key, enum PackedForm form, size_t depth, size_t columns) {
    for (Packed *one = all; one; one = one->next)
        if (one->key == key && one->form == form && one->depth == depth && one->columns == columns) return one;
    return NULL;
}

Packed *packed_from(const void *weights, const float *scale, size_t depth, size_t columns, int by_rows,
                    enum PackedForm form, int most) {
    pthread_mutex_lock(&lock);
    Packed *found = find(weights, form, depth, columns);
    if (found) {
        found->uses++;
        while (!found->made) pthread_cond_wait(&changed, &lock); /* another thread is at it */
        pthread_mutex_unlock(&lock);
        return found;
    }
    found = calloc(1, sizeof *found);
    if (!found) abort();
    found->form = form, found->depth = depth, found->columns = columns, found->key = weights, found->uses = 1;
    found->next = all, all = found;
    pthread_mutex_unlock(&lock);
    if (form == FLOAT_PANELS)
        pack_floats(found, weights, by_rows);
    else if (form == INT8_PANELS)
        pack_int8(found, weights, scale, by_rows);
    else
        pack_rounded(found, weights, by_rows, most);
    drop_pages(weights, depth * columns * (form == INT8_PANELS ? 1 : sizeof(float)));
    pthread_mutex_lock(&lock);
    found->made = 1;
    pthread_cond_broadcast(&changed);
    pthread_mutex_unlock(&lock);
    return found;
}

Packed *packed_before(const void *weights, size_t depth, size_t columns, enum PackedForm form) {
    pthread_mutex_lock(&lock);
    Packed *found = find(weights, form, depth, columns);
    if (found && !found->made) found = NULL;
    if (found) found->uses++;
    pthread_mutex_unlock(&lock);
    return found;
}

void give_back(Packed *packed) {
    if (!packed) return;
    pthread_mutex_lock(&lock);
    int last = --packed->uses == 0;
    for (Packed **place = &all; last && *place; place = &(*place)->next)
        if (*place == packed) {
            *place = packed->next;
            break;
        }
    pthread_mutex_unlock(&lock);
    if (!last) return;
    free(packed->floats);
    free((void *)packed->int8.panels);
    free((void *)packed->int8.sums);
    free(packed->scale);
    free(packed->wrong);
    free(packed->norms);
    free(packed);
}

#ifdef __clang__
#pragma clang attribute pop
#endif
