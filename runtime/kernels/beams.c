/* Beam search by a step program: each step feeds its beams to the next one, with no call in between.

   What is computed is that of search/beam.py: a step's best 2K continuations of a source are ranked; an end token among
   the first K finishes a hypothesis, the first K others run on, and search/beam_styles.py says when a source is done. The
   only rules are tokens that a plan bans, as in greedy search (chain.c). Sources that are done are left out of the next
   step, and nothing is moved for that. The loop ends when all are done, when the cache is full, or when a logit is not
   finite. The cache is full where dropping the slots that no beam sees leaves fewer than `room`; then no step may run.

   What a source keeps from one call to the next is a row of `state`, one of `scores` and its beams' mask. */
#include <math.h>
#include <string.h>

#include "chain.h"

static const char *const MISFIT = "StepProgram: beams do not fit the batch, its plan or its cache";

/* Numbers of a row of `state`; after them, K each: the beams' tokens, and of hypotheses that have finished their
   lengths, the beams that they continue, and their last tokens. */
enum { POSITION, WRITTEN, DONE, FINISHED, BEST_FINISHED, NUMBERS };
enum { KINDS = 4, SCORE_KINDS = 3 /* of running beams, of finished hypotheses, and log-probabilities of their last tokens */ };

/* When a source is done (search/beam_styles.py): with K hypotheses finished, when no running beam is better at its length
   or at the greatest, or at once; or with `enough` of them, or enough and one that was the best of its step. */
enum Style { NO_BETTER, NEVER_BETTER, ALL_FINISHED, ENOUGH, ENOUGH_AND_BEST, STYLES };

typedef struct {
    double score, log_prob;
    int64_t token;
    size_t parent;
} Continuation;

typedef struct {
    const Chain *chain;
    Tensor *values;
    size_t sources, beams, slots, steps, targets, vocab, room;
    size_t running; /* sources that are not done; their numbers are in `active` */
    size_t fed; /* beams of a source that a step is fed: one, as long as they are alike, or all */
    int64_t end, enough, style;
    const int64_t *target, *limit;
    const uint8_t *banned;
    const double *norms; /* by which the score of each length is divided */
    int64_t *state, *active, *tokens, *position, *written;
    double *scores;
    uint8_t *mask, *before;
    Continuation *best;
    int64_t *choices; /* [steps,2,B,K] tokens and parents */
    double *log_probs;
} Beams;

static int64_t *state_of(const Beams *beams, size_t source) {
    return beams->state + source * (NUMBERS + KINDS * beams->beams);
}

static double *scores_of(const Beams *beams, size_t source) { return beams->scores + source * SCORE_KINDS * beams->beams; }

/* log(sum(exp(logits))) of a row. */
static double normaliser_of(const Beams *beams, size_t row, size_t width) {
    const float *logits = beams->values[beams->chain->best_logits].data;
    const float *sums = beams->values[beams->chain->exp_sum].data;
    return log((double)sums[row]) + (double)logits[row * width];
}

/* The 2K best continuations of the source that is in place `place` of the step, of equals those of the lower beam
   first -> how many there are. */
static size_t continuations(const Beams *beams, size_t place, Continuation *best) {
    const Tensor *tokens = &beams->values[beams->chain->best_tokens];
    const float *logits = beams->values[beams->chain->best_logits].data;
    size_t width = (size_t)tokens->dims[2], found = 0, most = 2 * beams->beams;
    size_t source = (size_t)beams->active[place];
    int64_t target = beams->target[source * beams->targets + (size_t)state_of(beams, source)[POSITION]];
    const uint8_t *banned = beams->banned + (size_t)(-1 - target) * beams->vocab;
    for (size_t k = 0; k < beams->fed; k++) {
        size_t row = place * beams->fed + k, first = row * width;
        double normaliser = normaliser_of(beams, row, width), offset = scores_of(beams, source)[k] - normaliser;
        for (size_t i = 0; i < width; i++) {
            int64_t token = ((int64_t *)tokens->data)[first + i];
            double logit = banned[token] ? -INFINITY : logits[first + i], score = logit + offset;
            if (found == most && !(score > best[found - 1].score)) continue;
            size_t rank = found < most ? found++ : most - 1;
            for (; rank && score > best[rank - 1].score; rank--) best[rank] = best[rank - 1];
            best[rank] = (Continuation){score, logit - normaliser, token, k};
        }
    }
    return found;
}

/* The first source of which a logit is not finite, or NO_VALUE. */
static int64_t not_finite(const Beams *beams) {
    size_t width = (size_t)beams->values[beams->chain->best_tokens].dims[2];
    for (size_t row = 0; row < beams->running * beams->fed; row++)
        if (!isfinite(normaliser_of(beams, row, width))) return beams->active[row / beams->fed];
    return NO_VALUE;
}

static int has_known_tokens(const Beams *beams) {
    const Tensor *tokens = &beams->values[beams->chain->best_tokens];
    for (size_t i = 0; i < tokens->count; i++)
        if ((uint64_t)((int64_t *)tokens->data)[i] >= beams->vocab) return 0;
    return 1;
}

/* Puts a hypothesis among the K best of its source, behind those that are as good. */
static void finish(const Beams *beams, size_t source, const Continuation *one, double score) {
    size_t many = beams->beams;
    double *finished = scores_of(beams, source) + many, *log_probs = finished + many;
    int64_t *ends = state_of(beams, source) + NUMBERS + many;
    if (!(score > finished[many - 1])) return;
    size_t place = many - 1;
    for (; place && score > finished[place - 1]; place--) {
        finished[place] = finished[place - 1], log_probs[place] = log_probs[place - 1];
        for (size_t kind = 0; kind < 3; kind++) ends[kind * many + place] = ends[kind * many + place - 1];
    }
    finished[place] = score, log_probs[place] = one->log_prob;
    ends[place] = state_of(beams, source)[POSITION] + 1;
    ends[many + place] = (int64_t)one->parent;
    ends[2 * many + place] = one->token;
}

static int is_done(const Beams *beams, size_t source) {
    const int64_t *state = state_of(beams, source);
    const double *running = scores_of(beams, source), *finished = running + beams->beams;
    int64_t length = state[POSITION] + 1, longest = beams->limit[source];
    if (length == longest || running[0] == -INFINITY) return 1;
    if (beams->style == ENOUGH) return state[FINISHED] >= beams->enough;
    if (beams->style == ENOUGH_AND_BEST) return state[FINISHED] >= beams->enough && state[BEST_FINISHED];
    double worst = finished[beams->beams - 1];
    if (worst == -INFINITY || beams->style == ALL_FINISHED) return worst > -INFINITY;
    return running[0] / beams->norms[beams->style == NEVER_BETTER ? longest : length] <= worst;
}

/* Finishes what ends, and lets the best `found` of the others run on, or K. */
static void take(const Beams *beams, size_t source, size_t step, size_t found) {
    size_t many = beams->beams, going = 0;
    int64_t *state = state_of(beams, source), *tokens = beams->choices + (2 * step * beams->sources + source) * many;
    int64_t *parents = tokens + beams->sources * many;
    double *running = scores_of(beams, source), *log_probs = beams->log_probs + (step * beams->sources + source) * many;
    const Continuation *best = beams->best;
    int last = state[POSITION] + 1 == beams->limit[source];
    for (size_t i = 0; i < found; i++) {
        int stops = last || best[i].token == beams->end;
        if (stops && i < many && best[i].score > -INFINITY) {
            finish(beams, source, &best[i], best[i].score / beams->norms[state[POSITION] + 1]);
            state[FINISHED]++, state[BEST_FINISHED] |= !i;
        }
        if (stops || going == many) continue;
        tokens[going] = best[i].token, parents[going] = (int64_t)best[i].parent;
        running[going] = best[i].score, log_probs[going++] = best[i].log_prob;
    }
    for (; going < many; going++) tokens[going] = 0, parents[going] = 0, running[going] = log_probs[going] = -INFINITY;
    memcpy(state + NUMBERS, tokens, many * sizeof(int64_t));
    state[DONE] = is_done(beams, source);
}

/* Every beam inherits the slots of its parent. */
static void descend(const Beams *beams, size_t source, size_t step) {
    size_t many = beams->beams, slots = beams->slots, moved = 0;
    const int64_t *parents = beams->choices + ((2 * step + 1) * beams->sources + source) * many;
    uint8_t *mask = beams->mask + source * many * slots;
    for (size_t k = 0; k < many; k++) moved |= (size_t)parents[k] != k;
    if (!moved) return;
    memcpy(beams->before, mask, many * slots);
    for (size_t k = 0; k < many; k++) memcpy(mask + k * slots, beams->before + (size_t)parents[k] * slots, slots);
}

/* All sources' step, once it is computed. Those that are done are no longer active. */
static void advance(Beams *beams, size_t step) {
    size_t running = 0;
    for (size_t place = 0; place < beams->running; place++) {
        size_t source = (size_t)beams->active[place];
        int64_t *state = state_of(beams, source);
        take(beams, source, step, continuations(beams, place, beams->best));
        descend(beams, source, step);
        state[POSITION]++, state[WRITTEN] += (int64_t)beams->fed;
        if (!state[DONE]) beams->active[running++] = (int64_t)source;
    }
    beams->running = running;
    beams->fed = beams->beams;
}

/* What the next step is fed: the beams of every source, and the slots that they see, those that it writes among them. */
static void feed(const Beams *beams) {
    size_t fed = beams->fed, slots = beams->slots;
    const Chain *chain = beams->chain;
    Tensor *tokens = &beams->values[chain->tokens], *mask = &beams->values[chain->self_mask];
    Tensor *position = &beams->values[chain->position], *written = &beams->values[chain->write_index];
    size_t positions = position->rank == 2 ? fed : 1; /* of a source: one for each beam, or one */
    for (size_t place = 0; place < beams->running; place++) {
        size_t source = (size_t)beams->active[place];
        const int64_t *state = state_of(beams, source);
        uint8_t *seen = beams->mask + source * beams->beams * slots;
        beams->written[place] = state[WRITTEN];
        for (size_t k = 0; k < positions; k++) beams->position[place * positions + k] = state[POSITION];
        memcpy(beams->tokens + place * fed, state + NUMBERS, fed * sizeof(int64_t));
        for (size_t k = 0; k < beams->beams; k++) /* alike beams have the same slot */
            seen[k * slots + (size_t)state[WRITTEN] + k % fed] = 1;
        if (fed < beams->beams) memcpy(beams->before + source * slots, seen, slots);
    }
    tokens->dims[0] = position->dims[0] = written->dims[0] = (int64_t)beams->running;
    tokens->dims[1] = mask->dims[1] = (int64_t)fed;
    if (position->rank == 2) position->dims[1] = (int64_t)fed;
    tokens->count = beams->running * fed, position->count = beams->running * positions, written->count = beams->running;
    mask->count = beams->sources * fed * slots, mask->data = fed < beams->beams ? beams->before : beams->mask;
}

static size_t most_written(const Beams *beams) {
    int64_t most = 0;
    for (size_t i = 0; i < beams->running; i++) {
        const int64_t *state = state_of(beams, (size_t)beams->active[i]);
        if (state[WRITTEN] > most) most = state[WRITTEN];
    }
    return (size_t)most;
}

/* Moves the slots that some beam of a source sees to the front of its cache, in their order. */
static void compact(void *given, size_t place) {
    const Beams *beams = given;
    size_t source = (size_t)beams->active[place];
    size_t slots = beams->slots, used = (size_t)state_of(beams, source)[WRITTEN], count = 0;
    uint8_t *mask = beams->mask + source * beams->beams * slots;
    int32_t *live = scratch(SLOTS, (used + 8) * sizeof(int32_t));
    for (size_t slot = 0; slot < used; slot++) {
        int seen = 0;
        for (size_t k = 0; k < beams->beams; k++) seen |= mask[k * slots + slot];
        if (seen) live[count++] = (int32_t)slot;
    }
    size_t moved = 0;
    while (moved < count && (size_t)live[moved] == moved) moved++;
    for (size_t i = 0; i < beams->chain->caches && moved < count; i++) {
        const Tensor *cache = &beams->values[beams->chain->cache[i].input];
        size_t width = (size_t)cache->dims[3], heads = (size_t)cache->dims[1];
        for (size_t h = 0; h < heads; h++) {
            float *rows = (float *)cache->data + (source * heads + h) * slots * width;
            for (size_t to = moved; to < count; to++)
                memcpy(rows + to * width, rows + (size_t)live[to] * width, width * sizeof(float));
        }
    }
    for (size_t k = 0; k < beams->beams; k++) {
        for (size_t to = moved; to < count; to++) mask[k * slots + to] = mask[k * slots + (size_t)live[to]];
        memset(mask + k * slots + count, 0, used - count);
    }
    state_of(beams, source)[WRITTEN] = (int64_t)count;
}

/* Whether another step has room in the cache. Where fewer than `least` slots are free, those that no beam sees are, too. */
static int has_room(Beams *beams, void *parts, size_t least) {
    if (most_written(beams) + least <= beams->slots) return 1;
    if (in_parallel(parts, compact, beams->running, beams)) return 0;
    return most_written(beams) + beams->room <= beams->slots;
}

/* Targets that are rows of bans, and norms of all lengths. */
static int plan_fits(const Beams *beams, size_t bans, size_t norms) {
    for (size_t i = 0; i < beams->sources * beams->targets; i++)
        if (beams->target[i] >= 0 || beams->target[i] < -(int64_t)bans) return 0;
    for (size_t i = 0; i < beams->sources; i++)
        if (beams->limit[i] < 1 || (size_t)beams->limit[i] > beams->targets || (size_t)beams->limit[i] >= norms) return 0;
    return beams->style >= 0 && beams->style < STYLES && (int64_t)beams->room >= (int64_t)beams->beams;
}

static int state_fits(const Beams *beams, size_t source) {
    const int64_t *state = state_of(beams, source);
    if (state[POSITION] < 0 || state[POSITION] >= beams->limit[source]) return 0;
    return state[WRITTEN] >= 0 && (uint64_t)state[WRITTEN] <= beams->slots;
}

/* What an input says, in the memory of the output that follows it: the same memory, where a session binds it so. */
static void *carried(const Beams *beams, void *context, int input, int output, size_t size) {
    const Tensor *given = &beams->values[input];
    void *to = output_of(context, (size_t)(output - beams->chain->first_output), given->dims, given->rank);
    if (to && to != given->data) memcpy(to, given->data, given->count * size);
    return to;
}

static int begin(Beams *beams, void *context) {
    const Chain *chain = beams->chain;
    const Tensor *values = beams->values;
    size_t rows = beams->sources * beams->beams, numbers = 2 * (beams->sources + rows);
    int64_t shape[] = {(int64_t)beams->steps, 2, (int64_t)beams->sources, (int64_t)beams->beams};
    int64_t scored[] = {shape[0], shape[2], shape[3]};
    if (values[chain->beam_state].count != beams->sources * NUMBERS + KINDS * rows ||
        values[chain->beam_scores].count != SCORE_KINDS * rows || values[chain->self_mask].count != rows * beams->slots ||
        values[chain->position].count != (values[chain->position].rank == 2 ? rows : beams->sources) ||
        values[chain->write_index].count != beams->sources)
        return 0;
    beams->choices = output_of(context, (size_t)(chain->beam_choices - chain->first_output), shape, 4);
    beams->log_probs = output_of(context, (size_t)(chain->beam_log_probs - chain->first_output), scored, 3);
    beams->state = carried(beams, context, chain->beam_state, chain->new_state, sizeof(int64_t));
    beams->scores = carried(beams, context, chain->beam_scores, chain->new_scores, sizeof(double));
    beams->mask = carried(beams, context, chain->self_mask, chain->new_mask, 1);
    if (!beams->choices || !beams->log_probs || !beams->state || !beams->scores || !beams->mask) return 0;
    for (size_t i = 0; i < chain->caches; i++) { /* slots may be dropped before the first step */
        Tensor *cache = &beams->values[chain->cache[i].input];
        cache->data = carried(beams, context, chain->cache[i].input, chain->cache[i].output, sizeof(float));
        if (!cache->data) return 0;
    }
    beams->best = scratch(CARRIED, 2 * beams->beams * sizeof(Continuation) + numbers * sizeof(int64_t) + rows * beams->slots);
    beams->active = (int64_t *)(beams->best + 2 * beams->beams);
    beams->tokens = beams->active + beams->sources;
    beams->position = beams->tokens + rows;
    beams->written = beams->position + rows;
    beams->before = (uint8_t *)(beams->written + beams->sources);
    int first = 1;
    for (size_t source = 0; source < beams->sources; source++) {
        if (state_of(beams, source)[DONE]) continue;
        if (!state_fits(beams, source)) return 0;
        first &= !state_of(beams, source)[POSITION];
        beams->active[beams->running++] = (int64_t)source;
    }
    if (!beams->running) return 0;
    beams->fed = first ? 1 : beams->beams;
    beams->values[chain->tokens].data = beams->tokens;
    beams->values[chain->position].data = beams->position;
    beams->values[chain->write_index].data = beams->written;
    return 1;
}

size_t beam_steps(const Chain *chain, const Tensor *values) {
    const Tensor *steps = chain->steps == NO_VALUE ? NULL : &values[chain->beam_steps];
    return steps && steps->count == 1 && *(int64_t *)steps->data > 0 ? (size_t) * (int64_t *)steps->data : 0;
}

Status run_beams(const Chain *chain, Frame *frame, Status (*step)(void *given), void *given) {
    enum { STYLE, ENOUGH_FINISHED, ROOM, RULES };
    Tensor *values = frame->values;
    const Tensor *tokens = &values[chain->tokens], *mask = &values[chain->self_mask], *target = &values[chain->target];
    const Tensor *banned = &values[chain->banned], *rules = &values[chain->beam_rules];
    if (tokens->rank != 2 || mask->rank != 3 || target->rank != 2 || banned->rank != 2 || rules->count != RULES ||
        values[chain->end].count != 1 || values[chain->limit].count != (size_t)tokens->dims[0] ||
        target->dims[0] != tokens->dims[0])
        return error_of(MISFIT);
    const int64_t *rule = rules->data;
    int64_t two[] = {2}, *ran = output_of(frame->context, (size_t)(chain->beam_runs - chain->first_output), two, 1);
    Beams beams = {.chain = chain,
                   .values = values,
                   .sources = (size_t)tokens->dims[0],
                   .beams = (size_t)tokens->dims[1],
                   .slots = (size_t)mask->dims[2],
                   .steps = beam_steps(chain, values),
                   .targets = (size_t)target->dims[1],
                   .vocab = (size_t)banned->dims[1],
                   .room = (size_t)rule[ROOM],
                   .end = *(int64_t *)values[chain->end].data,
                   .enough = rule[ENOUGH_FINISHED],
                   .style = rule[STYLE],
                   .target = target->data,
                   .limit = values[chain->limit].data,
                   .banned = banned->data,
                   .norms = values[chain->beam_norms].data};
    if (!ran || !plan_fits(&beams, (size_t)banned->dims[0], values[chain->beam_norms].count) || !begin(&beams, frame->context))
        return error_of(MISFIT);
    frame->sources = beams.active;
    ran[0] = 0, ran[1] = NO_VALUE; /* steps that ran, and the source of which a logit is not finite */
    for (size_t least = beams.room; has_room(&beams, tagged(frame), least); least = beams.beams) {
        feed(&beams);
        Status failed = step(given);
        if (failed) return failed;
        run_in_place(chain, values);
        if (!has_known_tokens(&beams)) return error_of(MISFIT);
        if ((ran[1] = not_finite(&beams)) != NO_VALUE) return NULL;
        advance(&beams, (size_t)ran[0]);
        if ((size_t)++ran[0] == beams.steps || !beams.running) break;
    }
    return NULL;
}
