/* A team (runtime/kernels/team.c) of threads of our own, as ONNX Runtime lends it its threads: parts are counted.

   cc -I runtime/kernels team_of_threads.c runtime/kernels/team.c -lpthread; arguments: threads, rounds, microseconds that
   the threads other than the first are late. Ends with 0 if every part of every round was done once, and by nobody
   before or after its round, and every thread may run where it might before. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "program.h"

enum { MOST_THREADS = 64, MOST_PARTS = 300 };

typedef struct {
    void (*body)(void *, size_t);
    size_t count, next;
    void *given;
    unsigned late;
} Loop;

typedef struct {
    size_t rounds, round, parts, wrong;
    unsigned char done[MOST_PARTS]; /* not atomic: two threads that do one part are a race */
} Work;

static size_t threads, moved;
static unsigned lateness;
static cpu_set_t allowed;

static void check_affinity(void) {
    cpu_set_t now;
    if (!sched_getaffinity(0, sizeof now, &now) && !CPU_EQUAL(&now, &allowed))
        __atomic_fetch_add(&moved, 1, __ATOMIC_RELAXED);
}

static void *take_all(void *given) {
    Loop *loop = given;
    for (;;) {
        size_t number = __atomic_fetch_add(&loop->next, 1, __ATOMIC_RELAXED);
        if (number >= loop->count) return check_affinity(), NULL;
        if (number && loop->late) usleep(loop->late);
        loop->body(loop->given, number);
    }
}

Status in_parallel(void *context, void (*body)(void *, size_t), size_t count, void *given) {
    (void)context;
    Loop loop = {body, count < threads ? threads : count, 0, given, lateness};
    pthread_t others[MOST_THREADS];
    for (size_t i = 1; i < threads; i++) pthread_create(&others[i], NULL, take_all, &loop);
    take_all(&loop);
    for (size_t i = 1; i < threads; i++) pthread_join(others[i], NULL);
    return NULL;
}

static void do_part(void *given, size_t number) {
    Work *work = given;
    if (number >= work->parts) abort();
    work->done[number]++;
}

static void lead(void *given, Team *team) {
    Work *work = given;
    for (work->round = 0; work->round < work->rounds; work->round++) {
        work->parts = work->round * 7 % MOST_PARTS; /* none and one, too */
        run_in_team(team, do_part, work->parts, work);
        for (size_t i = 0; i < MOST_PARTS; i++) {
            work->wrong += work->done[i] != (i < work->parts);
            work->done[i] = 0;
        }
    }
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    sched_getaffinity(0, sizeof allowed, &allowed);
    threads = strtoul(arguments[1], NULL, 10), lateness = (unsigned)strtoul(arguments[3], NULL, 10);
    for (int call = 0; call < 3; call++) {
        Work work = {.rounds = strtoul(arguments[2], NULL, 10)};
        run_together(NULL, lead, &work);
        if (work.wrong || work.round != work.rounds || moved) {
            printf("call %d: %zu parts wrong, %zu rounds, %zu threads moved\n", call, work.wrong, work.round, moved);
            return 1;
        }
    }
    return 0;
}
