/* Only processors with AVX2 get here (library.c). */
#ifdef __clang__
#pragma clang attribute push(__attribute__((target("avx2,fma"))), apply_to = function)
#else
#pragma GCC target("avx2,fma")
#endif
#include "packing.h"

#include <float.h>
#include <math.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
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
    int file;
    struct Mapped *next;
} Mapped;
static Mapped *files;

void note_mapped(const void *start, size_t size, int file) {
    uintptr_t place = (uintptr_t)start;
    pthread_mutex_lock(&lock);
    if (file >= 0) {
        Mapped *made = malloc(sizeof *made);
        if (!made) abort();
        *made = (Mapped){place, place + size, file, files};
        files = made;
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

/* The file that memory is of, or NULL. Called with the lock held. */
static const Mapped *file_of(const void *start, size_t size) {
    uintptr_t place = (uintptr_t)start;
    for (const Mapped *file = files; file; file = file->next)
        if (file->start <= place && place + size <= file->end) return file;
    return NULL;
}

int mapped_file(const void *start, size_t size, int64_t *offset) {
    pthread_mutex_lock(&lock);
    const Mapped *found = file_of(start, size);
    int file = found ? found->file : -1;
    if (found) *offset = (int64_t)((uintptr_t)start - found->start);
    pthread_mutex_unlock(&lock);
    return file;
}

int read_file(int file, int64_t offset, void *to, size_t size) {
#ifdef __linux__
    return pread(file, to, size, (off_t)offset) == (ssize_t)size;
#else
    return (void)file, (void)offset, (void)to, (void)size, 0;
#endif
}

/* Drops the pages of weights that are packed now, if they lie in a mapped file: rows of them may have been read. */
static void drop_pages(const void *weights, size_t size) {
#ifdef MADV_DONTNEED
    uintptr_t page = 4096, start = (uintptr_t)weights / page * page, end = (uintptr_t)weights + size;
    pthread_mutex_lock(&lock);
    if (file_of(weights, size)) madvise((void *)start, end - start, MADV_DONTNEED);
    pthread_mutex_unlock(&lock);
#else
    (void)weights, (void)size;
#endif
}

/* Weights to be packed, once: those of a mapped file are read, so that its pages are not mapped beside what is made of
   them. The system maps up to 2 MB around what is touched. */
typedef struct {
    const char *memory;
    char *read; /* NULL: there is no file */
    int64_t offset;
    int file;
} Stored;

static Stored stored_at(const void *weights, size_t size, size_t most_at_once) {
    Stored stored = {.memory = weights};
    stored.file = mapped_file(weights, size, &stored.offset);
    stored.read = stored.file < 0 ? NULL : malloc(most_at_once);
    return stored;
}

/* Bytes of them, until the next call. */
static const void *bytes_of(const Stored *stored, size_t first, size_t size) {
    if (stored->read && read_file(stored->file, stored->offset + (int64_t)first, stored->read, size))
        return stored->read;
    return stored->memory + first;
}

static size_t panels_of(size_t columns) { return (columns + PANEL - 1) / PANEL; }

/* [D,N] -> panels, some rows at a time: as many as a core's cache holds. */
static void pack_across(Packed *made, const float *weights) {
    enum { HELD = 1 << 18 };
    size_t depth = made->depth, columns = made->columns, row = columns * sizeof(float),
           most = HELD / row > 1 ? HELD / row : 1;
    Stored stored = stored_at(weights, depth * row, most * row);
    for (size_t d = 0; d < depth; d += most) {
        size_t rows = depth - d < most ? depth - d : most;
        const float *from = bytes_of(&stored, d * row, rows * row);
        for (size_t first = 0; first < columns; first += PANEL) {
            size_t count = columns - first < PANEL ? columns - first : PANEL;
            float *panel = made->floats + first * depth + d * PANEL;
            for (size_t r = 0; r < rows; r++) {
                memcpy(panel + r * PANEL, from + r * columns + first, count * sizeof(float));
                if (count < PANEL) memset(panel + r * PANEL + count, 0, (PANEL - count) * sizeof(float));
            }
        }
    }
    free(stored.read);
}

/* [N,D] -> panels. */
static void pack_along(Packed *made, const float *weights) {
    size_t depth = made->depth, columns = made->columns, row = depth * sizeof(float);
    Stored stored = stored_at(weights, columns * row, PANEL * row);
    for (size_t first = 0; first < columns; first += PANEL) {
        size_t count = columns - first < PANEL ? columns - first : PANEL;
        float *panel = made->floats + first * depth;
        const float *rows = bytes_of(&stored, first * row, count * row);
        if (count < PANEL) memset(panel, 0, depth * PANEL * sizeof(float));
        for (size_t d = 0; d < depth; d++)
            for (size_t c = 0; c < count; c++) panel[d * PANEL + c] = rows[c * depth + d];
    }
    free(stored.read);
}

static void pack_floats(Packed *made, const float *weights, int by_rows) {
    made->floats = reserved(panels_of(made->columns) * made->depth * PANEL * sizeof(float));
    (by_rows ? pack_along : pack_across)(made, weights);
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
    Stored stored = stored_at(weights, depth * columns, depth * (by_rows ? PANEL : columns));
    if (!by_rows) weights = bytes_of(&stored, 0, depth * columns);
    int8_t *to = reserved(panels * size);
    int32_t *sums = reserved(panels * PANEL * sizeof(int32_t));
    for (size_t p = 0; p < panels; p++) {
        size_t first = p * PANEL, count = columns - first < PANEL ? columns - first : PANEL;
        if (by_rows) weights = bytes_of(&stored, first * depth, count * depth);
        pack_panel(to + p * size, sums + first, weights, depth, columns, by_rows ? 0 : first, count, by_rows);
    }
    free(stored.read);
    made->scale = reserved(columns * sizeof(float));
    memcpy(made->scale, scale, columns * sizeof(float));
    made->int8 = (Int8Weights){to, made->scale, sums, depth, columns};
}

enum { MOST_WORD = 258 * 127 }; /* of words: what was in int8 before is a whole number of them */
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

/* Numbers of few steps -> the nearest step: adding 1.5 * 2^23 leaves integers in the lowest bits. */
static int16_t nearest(float number) {
    float shifted = number + 12582912.0f;
    int32_t bits;
    memcpy(&bits, &shifted, sizeof bits);
    return (int16_t)(bits - 0x4B400000);
}

static void round_steps(const float *numbers, float inverse, size_t count, int16_t *steps) {
    for (size_t i = 0; i < count; i++) steps[i] = nearest(numbers[i] * inverse);
}

/* The step above or below, by chance: more often the one that is nearer, so that the mean of it is the number itself.
   Then errors of tokens are independent, however alike the tokens are, and a sum over many has little of them. Chance
   is a number's place in the table (a hash of it), so a table is always rounded in the same way. */
static void dither_steps(const float *numbers, float inverse, size_t count, uint32_t place, int16_t *steps) {
    for (size_t i = 0; i < count; i++) {
        uint32_t h = (place + (uint32_t)i) * 0x9E3779B1u;
        h = (h ^ h >> 15) * 0x85EBCA77u;
        h = (h ^ h >> 13) * 0xC2B2AE3Du;
        steps[i] = nearest(numbers[i] * inverse + (float)(int32_t)(h ^ h >> 16) * 0x1p-32f);
    }
}

/* At least the length of numbers - scale * steps; no steps: of the numbers themselves. */
static float length_of(const float *numbers, const int16_t *steps, float scale, size_t count) {
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
    return (float)((sqrt(sum) + sqrt((double)count) * 0x1p-62) * /* squares of less than 2^-63 are lost */
                   (1 + (double)count * 0x1p-23));               /* sums in float err less than that */
}

/* Rounds the weights of output `column`, `numbers` [D], to `most` steps of its own scale: `row` [D]. */
static void round_column(Packed *made, const float *numbers, size_t column, int most, int16_t *row) {
    size_t depth = made->depth;
    float largest = largest_of(numbers, depth), scale = fmaxf(largest / (float)most, FLT_MIN); /* has an inverse */
    made->finite &= largest < INFINITY;
    made->scale[column] = scale;
    if (made->form == WORD_PANELS)
        dither_steps(numbers, 1.0f / scale, depth, (uint32_t)(column * depth), row);
    else
        round_steps(numbers, 1.0f / scale, depth, row);
    if (!made->wrong) return;
    /* the difference of a number and its step is itself rounded */
    made->wrong[column] = length_of(numbers, row, scale, depth) + sqrtf((float)depth) * 0x1p-23f * largest;
    made->norms[column] = length_of(numbers, NULL, 0, depth);
    made->most_wrong = fmaxf(made->most_wrong, made->wrong[column]);
}

static void pack_rounded(Packed *made, const float *weights, int by_rows, int most) {
    size_t depth = made->depth, columns = made->columns, panels = panels_of(columns);
    size_t size = made->form == WORD_PANELS ? depth * PANEL : (depth + 3) / 4 * 4 * PANEL;
    int8_t *bytes = made->form == WORD_PANELS ? NULL : reserved(panels * size), *narrow = malloc(PANEL * depth);
    int16_t *words = bytes ? NULL : reserved(panels * size * sizeof(int16_t)),
            *steps = malloc(PANEL * depth * sizeof(int16_t));
    int32_t *sums = bytes ? reserved(panels * PANEL * sizeof(int32_t)) : NULL;
    float *copy = malloc(depth * sizeof(float));
    if (!narrow || !steps || !copy) abort();
    made->scale = reserved(columns * sizeof(float));
    if (made->form != ROUNDED_PANELS) {
        made->wrong = reserved(columns * sizeof(float));
        made->norms = reserved(columns * sizeof(float));
    }
    made->finite = 1;
    size_t whole = depth * columns * sizeof(float), row = depth * sizeof(float);
    Stored stored = stored_at(weights, whole, by_rows ? PANEL * row : whole);
    if (!by_rows) weights = bytes_of(&stored, 0, whole);
    for (size_t p = 0; p < panels; p++) {
        size_t first = p * PANEL, count = columns - first < PANEL ? columns - first : PANEL;
        if (by_rows) weights = bytes_of(&stored, first * row, count * row);
        if (count < PANEL) memset(steps, 0, PANEL * depth * sizeof(int16_t));
        for (size_t c = 0; c < count; c++) {
            for (size_t d = 0; !by_rows && d < depth; d++) copy[d] = weights[d * columns + first + c];
            round_column(made, by_rows ? weights + c * depth : copy, first + c, most, steps + c * depth);
        }
        for (size_t d = 0; words && d < depth; d++)
            for (size_t c = 0; c < PANEL; c++) words[p * size + d * PANEL + c] = steps[c * depth + d];
        for (size_t i = 0; bytes && i < count * depth; i++) narrow[i] = (int8_t)steps[i];
        if (bytes) pack_panel(bytes + p * size, sums + first, narrow, depth, columns, 0, count, 1);
    }
    free(stored.read);
    free(narrow);
    free(steps);
    free(copy);
    if (words)
        made->words = (WordWeights){words, made->scale, depth, columns};
    else
        made->int8 = (Int8Weights){bytes, made->scale, sums, depth, columns};
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
        pack_rounded(found, weights, by_rows, form == WORD_PANELS ? MOST_WORD : most);
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
    free((void *)packed->words.panels);
    free(packed->scale);
    free(packed->wrong);
    free(packed->norms);
    free(packed);
}

#ifdef __clang__
#pragma clang attribute pop
#endif
