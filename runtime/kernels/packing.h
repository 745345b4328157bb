/* Weights in the order in which kernels read them. All sessions that read the same tensor share one packed form. */
#ifndef SEQ2ENGINE_PACKING_H
#define SEQ2ENGINE_PACKING_H

#include "kernels.h"

enum PackedForm {
    FLOAT_PANELS,   /* float */
    INT8_PANELS,    /* int8 that is int8 already */
    ROUNDED_PANELS, /* int8, rounded here from float, each output with its own scale */
    SCREENING,      /* the same, with bounds of what was lost */
};

typedef struct Packed {
    enum PackedForm form;
    size_t depth, columns;
    float *floats;
    Int8Weights int8;
    float *scale;         /* [N] of rounded weights */
    float *wrong, *norms; /* [N] of screening: lengths of what rounding changed, and of the weights */
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
/* Memory from `start` on is a file's, mapped: pages that have been packed are dropped, and read again if need be. */
void note_mapped(const void *start, size_t size, int mapped);

#endif
