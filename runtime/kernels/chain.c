/* Greedy search by a step program: each step feeds its chosen tokens to the next one, with no call in between.

   What a source has cached is at slots 0 to its position, as one beam writes one slot a step. The rules are a plan made
   before (search/ahead/greedy_plan.py): at every position a token that is forced, or -1 - r where row r of `banned` says which
   tokens are not allowed. A source is done after its end token or at its limit, and left out of the next step; nothing
   is moved for that. The loop ends when all are done, or when a logit is not finite. */
#include "chain.h"

#include <math.h>
#include <string.h>

#define MISFIT "StepProgram: the plan does not fit the batch, its vocabulary or its cache"

typedef struct {
    const Chain *chain;
    Tensor *values;
    size_t rows, slots, steps, targets, vocab;
    const int64_t *target, *limit;
    const uint8_t *banned;
    int64_t end, *position; /* of every row */
    int64_t *active, *fed_tokens, *fed_position; /* of the rows that are not done: their numbers, what a step is fed */
    uint8_t *mask;
    int64_t *chosen;
    float *top, *own, *sum;
    size_t running; /* rows that are not done */
    int failed;
} Greedy;

static void record(Greedy *greedy, size_t row, size_t step, int64_t token, float top, float own, float sum) {
    size_t place = row * greedy->steps + step;
    greedy->chosen[place] = token, greedy->top[place] = top, greedy->own[place] = own, greedy->sum[place] = sum;
}

/* The best candidate of a row that is not banned -> its place; none: the first. */
static size_t best_allowed(const Greedy *greedy, const int64_t *tokens, size_t count, int64_t target) {
    const uint8_t *banned = greedy->banned + (size_t)(-1 - target) * greedy->vocab;
    for (size_t i = 0; i < count; i++)
        if (!banned[tokens[i]]) return i;
    return 0;
}

/* What a row does with its step's candidates. Whether it is done. */
static int advance(Greedy *greedy, size_t row, size_t step, const int64_t *tokens, const float *logits, size_t count,
                   float sum) {
    int64_t target = greedy->target[row * greedy->targets + (size_t)greedy->position[row]];
    size_t best = target < 0 ? best_allowed(greedy, tokens, count, target) : 0;
    int64_t token = target < 0 ? tokens[best] : target;
    float top = isfinite(sum) ? logits[0] : NAN;
    greedy->failed |= !isfinite(top);
    record(greedy, row, step, token, top, logits[best], sum);
    if (token == greedy->end || greedy->position[row] + 1 >= greedy->limit[row]) return 1;
    if ((size_t)++greedy->position[row] < greedy->slots) /* or the cache is full, and this step the last one */
        greedy->mask[row * greedy->slots + (size_t)greedy->position[row]] = 1;
    return 0;
}

/* 0: a candidate is none of the plan's vocabulary. */
static int choose(Greedy *greedy, size_t step) {
    const Chain *chain = greedy->chain;
    const Tensor *tokens = &greedy->values[chain->best_tokens];
    const float *logits = greedy->values[chain->best_logits].data, *sums = greedy->values[chain->exp_sum].data;
    size_t count = (size_t)tokens->dims[tokens->rank - 1], running = 0, place = 0;
    for (size_t i = 0; i < greedy->running * count; i++)
        if ((uint64_t)((int64_t *)tokens->data)[i] >= greedy->vocab) return 0;
    for (size_t row = 0; row < greedy->rows; row++) {
        if (place == greedy->running || (size_t)greedy->active[place] != row) {
            record(greedy, row, step, greedy->end, 0, 0, 1);
            continue;
        }
        const int64_t *own = (const int64_t *)tokens->data + place * count;
        int done = advance(greedy, row, step, own, logits + place * count, count, sums[place]);
        place++;
        if (done) continue;
        greedy->fed_tokens[running] = greedy->chosen[row * greedy->steps + step];
        greedy->fed_position[running] = greedy->position[row];
        greedy->active[running++] = (int64_t)row;
    }
    greedy->running = running;
    return 1;
}

static void *outer_output(const Chain *chain, void *context, int place, size_t rows, size_t steps) {
    int64_t dims[] = {(int64_t)rows, (int64_t)steps};
    return output_of(context, (size_t)(place - chain->first_output), dims, 2);
}

/* The memory of what a step is fed, in place of the inputs: tokens, position (which is also where it writes) and mask. */
static int begin(Greedy *greedy) {
    const Chain *chain = greedy->chain;
    Tensor *values = greedy->values, *tokens = &values[chain->tokens], *mask = &values[chain->self_mask];
    size_t rows = greedy->rows;
    if (tokens->count != rows || mask->count != rows * greedy->slots) return 0;
    greedy->position = scratch(CARRIED, 4 * rows * sizeof(int64_t) + mask->count);
    greedy->active = greedy->position + rows;
    greedy->fed_tokens = greedy->active + rows;
    greedy->fed_position = greedy->fed_tokens + rows;
    greedy->mask = (uint8_t *)(greedy->fed_position + rows);
    memcpy(greedy->position, values[chain->position].data, rows * sizeof(int64_t));
    memset(greedy->mask, 0, mask->count);
    for (size_t row = 0; row < rows; row++) {
        int64_t position = greedy->position[row], token = ((int64_t *)tokens->data)[row];
        if (position < 0 || (size_t)position + greedy->steps > greedy->slots || greedy->limit[row] < 1 ||
            greedy->limit[row] > (int64_t)greedy->targets || position >= greedy->limit[row])
            return 0;
        memset(greedy->mask + row * greedy->slots, 1, (size_t)position + 1);
        if (position > 0 && token == greedy->end) continue; /* done */
        greedy->fed_tokens[greedy->running] = token, greedy->fed_position[greedy->running] = position;
        greedy->active[greedy->running++] = (int64_t)row;
    }
    tokens->data = greedy->fed_tokens, mask->data = greedy->mask;
    values[chain->position].data = values[chain->write_index].data = greedy->fed_position;
    return greedy->running || !rows;
}

/* The next step has the rows that are not done, and finds the others' beside theirs. */
static void feed(const Greedy *greedy) {
    const int fed[] = {greedy->chain->tokens, greedy->chain->position, greedy->chain->write_index};
    for (size_t i = 0; i < 3; i++) {
        Tensor *given = &greedy->values[fed[i]];
        given->dims[0] = (int64_t)greedy->running, given->count = greedy->running;
    }
}

/* Rows of `banned` that targets name, and forced tokens that exist. */
static int plan_fits(const Greedy *greedy, size_t bans) {
    for (size_t i = 0; i < greedy->rows * greedy->targets; i++) {
        int64_t target = greedy->target[i];
        if (target >= (int64_t)greedy->vocab || -1 - target >= (int64_t)bans) return 0;
    }
    return 1;
}

size_t chained_steps(const Chain *chain, const Tensor *values) {
    const Tensor *steps = chain->steps == NO_VALUE ? NULL : &values[chain->steps];
    return steps && steps->count == 1 && *(int64_t *)steps->data > 0 ? (size_t) * (int64_t *)steps->data : 0;
}

void run_in_place(const Chain *chain, Tensor *values) {
    for (size_t i = 0; i < chain->caches; i++)
        values[chain->cache[i].input].data = values[chain->cache[i].output].data;
}

Status run_greedy(const Chain *chain, Frame *frame, Status (*step)(void *given), void *given) {
    Tensor *values = frame->values;
    void *context = frame->context;
    const Tensor *target = &values[chain->target], *limit = &values[chain->limit], *banned = &values[chain->banned];
    if (target->rank != 2 || banned->rank != 2 || values[chain->self_mask].rank != 3 || values[chain->end].count != 1)
        return error_of(MISFIT);
    Greedy greedy = {.chain = chain,
                     .values = values,
                     .rows = values[chain->position].count,
                     .slots = (size_t)values[chain->self_mask].dims[2],
                     .steps = chained_steps(chain, values),
                     .targets = (size_t)target->dims[1],
                     .vocab = (size_t)banned->dims[1],
                     .target = target->data,
                     .limit = limit->data,
                     .banned = banned->data,
                     .end = *(int64_t *)values[chain->end].data};
    if (target->count != greedy.rows * greedy.targets || limit->count != greedy.rows ||
        !plan_fits(&greedy, (size_t)banned->dims[0]) || !begin(&greedy))
        return error_of(MISFIT);
    greedy.chosen = outer_output(chain, context, chain->chosen, greedy.rows, greedy.steps);
    greedy.top = outer_output(chain, context, chain->top_logits, greedy.rows, greedy.steps);
    greedy.own = outer_output(chain, context, chain->chosen_logits, greedy.rows, greedy.steps);
    greedy.sum = outer_output(chain, context, chain->exp_sums, greedy.rows, greedy.steps);
    int64_t one[] = {1}, *ran = output_of(context, (size_t)(chain->ran - chain->first_output), one, 1);
    if (!greedy.chosen || !greedy.top || !greedy.own || !greedy.sum || !ran)
        return error_of("StepProgram: an output of the plan is missing");
    frame->sources = greedy.active;
    for (*ran = 0; *ran < (int64_t)greedy.steps && !greedy.failed;) {
        feed(&greedy);
        Status failed = step(given);
        if (failed) return failed;
        run_in_place(chain, values);
        if (!choose(&greedy, (size_t)(*ran)++)) return error_of(MISFIT);
        if (!greedy.running) break;
    }
    return NULL;
}
