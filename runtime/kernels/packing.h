/* Weights in the order in which kernels read them. All sessions that read the same tensor share one packed form. */
#ifndef SEQ2ENGINE_PACKING_H
#define SEQ2ENGINE_PACKING_H

#include "kernels.h"

enum PackedForm {
    FLOAT_PANELS,   /* float */
    INT8_PANELS,    /* int8 that is int8 already */
    ROUNDED_PANELS, /* int8, rounded here from float, each output with its own scale */
    SCREENING,      /* the same, with bounds of what was lost */
    WORD_PANELS,    /* words of 16 bits, with such bounds */
};

typedef struct Packed {
    enum PackedForm form;
    size_t depth, columns;
    float *floats;
    Int8Weights int8;
    WordWeights words;
    float *scale;         /* [N] of rounded weights */
    float *wrong, *norms; /* [N] of screening and words: lengths of what rounding changed, and of the weights */
    float most_wrong;     /* the largest of `wrong` */
    int finite;           /* whether all weights are */
    /* of the table of packed weights */
    const void *key;
    int uses, made;
    struct Packed *next;
} Packed;

/* The packed form of weights with `depth` inputs and `columns` outputs, stored [D,N], or [N,D] where `by_rows`. `scale`
   are those of stored int8 weights. Each call wants a `give_back`. `most`: the largest step of rounded weights. */
Packed *packed_from(const void *weights, const float *scale, size_t depth, size_t columns, int by_rows,
                    enum PackedForm form, int most);
/* The same, if it was made before; else NULL, which wants no `give_back`. */
Packed *packed_before(const void *weights, size_t depth, size_t columns, enum PackedForm form);
void give_back(Packed *packed);
/* Memory from `start` on is that of an open file, mapped; -1: no longer. */
void note_mapped(const void *start, size_t size, int file);
/* The open file that memory is of, and where it is in the file; -1: of none. */
int mapped_file(const void *start, size_t size, int64_t *offset);
/* Copies bytes of a file without having pages of it mapped; 0: it cannot, so that they must be read in memory. */
int read_file(int file, int64_t offset, void *to, size_t size);

#endif
