/* How an operator is called by a program, where ONNX Runtime does not call it itself.

   A context is ONNX Runtime's or, with its lowest bit set, a `Frame` of ours; the same holds for what attributes are
   read from (`Prefixed`). */
#ifndef SEQ2ENGINE_PROGRAM_H
#define SEQ2ENGINE_PROGRAM_H

#include "runtime_api.h"

enum { MOST_INPUTS = 10, MOST_OUTPUTS = 4, NO_VALUE = -1 };

/* Places of a node's inputs and outputs among the program's values; NO_VALUE: absent. */
typedef struct {
    int inputs[MOST_INPUTS], outputs[MOST_OUTPUTS];
} Wires;

typedef struct Team Team;

typedef struct {
    const Wires *wires;
    Tensor *values; /* the program's inputs, its outputs, and what is made on the way */
    int first_output, first_made, kept_outputs; /* kept: outputs that many steps of one call write to memory of ours */
    const int *buffers; /* of what is made, from `first_made` on: the number of its memory */
    const int64_t *sources; /* of each source of a step, its place in caches, masks and encoder outputs; NULL: its own */
    void *context;          /* ONNX Runtime's, of the program */
    Team *team;
} Frame;

typedef struct {
    const void *info;
    const char *prefix; /* of the names of a node's attributes among the program's */
} Prefixed;

static inline void *tagged(const void *ours) { return (void *)((uintptr_t)ours | 1); }
static inline int is_ours(const void *pointer) { return (uintptr_t)pointer & 1; }
static inline void *untagged(const void *pointer) { return (void *)((uintptr_t)pointer & ~(uintptr_t)1); }

/* Where a source of a call is in what it has cached (Frame.sources). */
static inline const int64_t *sources_of(const void *context) {
    return is_ours(context) ? ((const Frame *)untagged(context))->sources : NULL;
}
static inline size_t source_at(const int64_t *sources, size_t number) { return sources ? (size_t)sources[number] : number; }

int framed_input(const Frame *frame, size_t place, Tensor *found);
void *framed_output(Frame *frame, size_t place, const int64_t *dims, size_t rank);

/* Threads that stay together for a whole program, so that sharing a part of it costs no call of ONNX Runtime. */
void run_together(void *context, void (*leader)(void *given, Team *team), void *given);
void run_in_team(Team *team, void (*body)(void *given, size_t number), size_t count, void *given);
size_t team_size(const Team *team); /* threads that have come so far */

#endif
