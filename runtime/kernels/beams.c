/* Beam search by a step program, as long as nothing ends: each step feeds its beams to the next one.

   A step's best 2K continuations of a source are ranked as search/beam.py ranks them. While no end token is among them
   the first K run on, and no other rule of a search applies. A step where one is, or a number that is not finite, or
   the last one that was asked for, is left to the caller, who gets its candidates. */
#include <math.h>
#include <string.h>

#include "chain.h"

static const char *const MISFIT = "StepProgram: beams do not fit the batch or its cache";

typedef struct {
    double score, log_prob;
    int64_t token;
    size_t parent;
} Continuation;

typedef struct {
    const Chain *chain;
    Tensor *values;
    size_t sources, beams, slots, steps;
    int64_t end, *tokens, *position, *written;
    uint8_t *mask, *before;
    double *running; /* [B,K] scores */
    Continuation *best;
    int64_t *all_tokens, *all_parents; /* [steps,B,K] */
    double *all_log_probs;
} Beams;

/* The 2K best continuations of a source, of equals those of the lower beam first -> how many there are. */
static size_t continuations(const Beams *beams, size_t source, Continuation *best) {
    const Tensor *tokens = &beams->values[beams->chain->best_tokens];
    const float *logits = beams->values[beams->chain->best_logits].data;
    const float *sums = beams->values[beams->chain->exp_sum].data;
    size_t width = (size_t)tokens->dims[2], found = 0, most = 2 * beams->beams;
    for (size_t k = 0; k < beams->beams; k++) {
        size_t row = source * beams->beams + k, first = row * width;
        double normaliser = log((double)sums[row]) + (double)logits[first], offset = beams->running[row] - normaliser;
        if (!isfinite(normaliser)) return 0;
        for (size_t i = 0; i < width; i++) {
            double logit = logits[first + i], score = logit + offset;
            if (found == most && !(score > best[found - 1].score)) continue;
            size_t place = found < most ? found++ : most - 1;
            for (; place && score > best[place - 1].score; place--) best[place] = best[place - 1];
            best[place] = (Continuation){score, logit - normaliser, ((int64_t *)tokens->data)[first + i], k};
        }
    }
    return found;
}

/* Whether all that happens in this step is that every source's best continuations run on. */
static int runs_on(const Beams *beams) {
    size_t many = 2 * beams->beams;
    for (size_t source = 0; source < beams->sources; source++) {
        Continuation *best = beams->best + source * many;
        size_t found = continuations(beams, source, best);
        if (found < beams->beams || best[0].score == -INFINITY) return 0;
        for (size_t i = 0; i < found; i++)
            if (best[i].token == beams->end) return 0;
    }
    return 1;
}

static void take(Beams *beams, size_t step) {
    size_t rows = beams->sources * beams->beams, many = 2 * beams->beams;
    for (size_t row = 0; row < rows; row++) {
        const Continuation *one = beams->best + row / beams->beams * many + row % beams->beams;
        beams->tokens[row] = beams->all_tokens[step * rows + row] = one->token;
        beams->all_parents[step * rows + row] = (int64_t)one->parent;
        beams->all_log_probs[step * rows + row] = one->log_prob;
        beams->running[row] = one->score;
    }
}

/* Every beam inherits the slots of its parent, one step further on. */
static void descend(Beams *beams, size_t step) {
    size_t rows = beams->sources * beams->beams;
    memcpy(beams->before, beams->mask, rows * beams->slots);
    for (size_t row = 0; row < rows; row++) {
        size_t parent = row - row % beams->beams + (size_t)beams->all_parents[step * rows + row];
        memcpy(beams->mask + row * beams->slots, beams->before + parent * beams->slots, beams->slots);
    }
    for (size_t source = 0; source < beams->sources; source++)
        beams->position[source]++, beams->written[source] += (int64_t)beams->beams;
}

static void mark_written(Beams *beams) {
    for (size_t row = 0; row < beams->sources * beams->beams; row++) {
        size_t slot = (size_t)beams->written[row / beams->beams] + row % beams->beams;
        beams->mask[row * beams->slots + slot] = 1;
    }
}

static size_t most_written(const Beams *beams) {
    int64_t most = 0;
    for (size_t source = 0; source < beams->sources; source++)
        if (beams->written[source] > most) most = beams->written[source];
    return (size_t)most;
}

/* The memory of what a step is fed, in place of the inputs; scores and mask are outputs as well. */
static int begin(Beams *beams, void *context) {
    const Chain *chain = beams->chain;
    Tensor *values = beams->values, *mask = &values[chain->self_mask], *scores = &values[chain->beam_scores];
    size_t rows = beams->sources * beams->beams, numbers = beams->sources * sizeof(int64_t);
    int64_t shape[] = {(int64_t)beams->steps, (int64_t)beams->sources, (int64_t)beams->beams};
    if (mask->count != rows * beams->slots || scores->count != rows || values[chain->position].count != beams->sources ||
        values[chain->write_index].count != beams->sources)
        return 0;
    beams->all_tokens = output_of(context, (size_t)(chain->beam_tokens - chain->first_output), shape, 3);
    beams->all_parents = output_of(context, (size_t)(chain->beam_parents - chain->first_output), shape, 3);
    beams->all_log_probs = output_of(context, (size_t)(chain->beam_log_probs - chain->first_output), shape, 3);
    beams->running = output_of(context, (size_t)(chain->new_scores - chain->first_output), scores->dims, 2);
    beams->mask = output_of(context, (size_t)(chain->new_mask - chain->first_output), mask->dims, 3);
    if (!beams->all_tokens || !beams->all_parents || !beams->all_log_probs || !beams->running || !beams->mask) return 0;
    memcpy(beams->running, scores->data, rows * sizeof(double));
    memcpy(beams->mask, mask->data, mask->count);
    beams->best = scratch(CARRIED, 2 * rows * sizeof(Continuation) + 2 * numbers + rows * sizeof(int64_t) + mask->count);
    beams->tokens = (int64_t *)(beams->best + 2 * rows);
    beams->position = beams->tokens + rows;
    beams->written = beams->position + beams->sources;
    beams->before = (uint8_t *)(beams->written + beams->sources);
    memcpy(beams->tokens, values[chain->tokens].data, rows * sizeof(int64_t));
    memcpy(beams->position, values[chain->position].data, numbers);
    memcpy(beams->written, values[chain->write_index].data, numbers);
    for (size_t source = 0; source < beams->sources; source++)
        if (beams->written[source] < 0) return 0;
    if (most_written(beams) + beams->beams > beams->slots) return 0;
    values[chain->tokens].data = beams->tokens, values[chain->self_mask].data = beams->mask;
    values[chain->position].data = beams->position, values[chain->write_index].data = beams->written;
    return 1;
}

size_t beam_steps(const Chain *chain, const Tensor *values) {
    const Tensor *steps = chain->steps == NO_VALUE ? NULL : &values[chain->beam_steps];
    return steps && steps->count == 1 && *(int64_t *)steps->data > 0 ? (size_t) * (int64_t *)steps->data : 0;
}

Status run_beams(const Chain *chain, Tensor *values, void *context, Status (*step)(void *given), void *given) {
    const Tensor *tokens = &values[chain->tokens], *mask = &values[chain->self_mask];
    if (tokens->rank != 2 || mask->rank != 3 || values[chain->beam_scores].rank != 2 || values[chain->end].count != 1)
        return error_of(MISFIT);
    int64_t two[] = {2}, *ran = output_of(context, (size_t)(chain->beam_runs - chain->first_output), two, 1);
    Beams beams = {.chain = chain,
                   .values = values,
                   .sources = (size_t)tokens->dims[0],
                   .beams = (size_t)tokens->dims[1],
                   .slots = (size_t)mask->dims[2],
                   .steps = beam_steps(chain, values),
                   .end = *(int64_t *)values[chain->end].data};
    if (!ran || !begin(&beams, context)) return error_of(MISFIT);
    for (ran[0] = ran[1] = 0;;) { /* steps that ran, and those of them of which nothing is left to do */
        if (ran[0]) descend(&beams, (size_t)ran[0] - 1);
        mark_written(&beams);
        Status failed = step(given);
        if (failed) return failed;
        run_in_place(chain, values);
        if ((size_t)++ran[0] == beams.steps || !runs_on(&beams)) return NULL;
        take(&beams, (size_t)ran[1]++);
        if (most_written(&beams) + 2 * beams.beams > beams.slots) return NULL;
    }
}
