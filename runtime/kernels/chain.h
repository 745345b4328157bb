/* Several steps of a step program in one call. */
#ifndef SEQ2ENGINE_CHAIN_H
#define SEQ2ENGINE_CHAIN_H

#include "program.h"

enum { MOST_CACHES = 256 };

typedef struct {
    int input, output;
} Cache;

/* Places among the program's values; `steps` is NO_VALUE where the program has no plan. */
typedef struct {
    int tokens, position, write_index, self_mask, steps, target, limit, banned, end; /* inputs */
    int beam_steps, beam_rules, beam_norms, beam_state, beam_scores;
    int first_output, exp_sum, best_logits, best_tokens, chosen, top_logits, chosen_logits, exp_sums, ran;
    int beam_choices, beam_log_probs, new_state, new_scores, new_mask, beam_runs;
    size_t caches;
    Cache cache[MOST_CACHES];
} Chain;

/* How many steps the plan among the inputs asks for; 0: one step as its inputs say. */
size_t chained_steps(const Chain *chain, const Tensor *values);
Status run_greedy(const Chain *chain, Frame *frame, Status (*step)(void *given), void *given);
size_t beam_steps(const Chain *chain, const Tensor *values); /* the same of beam search */
Status run_beams(const Chain *chain, Frame *frame, Status (*step)(void *given), void *given);
void run_in_place(const Chain *chain, Tensor *values); /* the next step reads the cache that this one has written */

#endif
