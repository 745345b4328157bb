/* The operators that ONNX Runtime gets, a file for each kind. */
#ifndef SEQ2ENGINE_OPERATORS_H
#define SEQ2ENGINE_OPERATORS_H

#include "kernels.h"
#include "packing.h"
#include "program.h"

extern const Kernels *kernels; /* of this processor */
/* Multiplications of a part of a call that another thread may take: what sharing costs decides, which is much less where
   threads stay together. */
static inline size_t least_work(const void *context) { return is_ours(context) ? 1 << 15 : 1 << 17; }

extern Operator linear, linear_int8, self_attention, cross_attention, encoder_attention, candidates, candidates_int8,
    embedding, embedding_int8, source_heads, step_program, encoder_program;

/* A kernel's packed weights, made by its first call: constant inputs never move. */
typedef struct {
    Packed *packed;
} Weights;
const Packed *weights_of(Weights *weights, const Tensor *stored, const float *scale, int by_rows, enum PackedForm form);

/* The packed form that another operator has made of the same memory, by rows; NULL as long as there is none. */
const Packed *packed_elsewhere(Weights *weights, const void *stored, size_t depth, size_t columns,
                               enum PackedForm form);

Steps steps_of(const void *info);

#endif
