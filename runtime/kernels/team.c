/* A team: the threads of a session for the time of one program.

   The thread that arrives first leads: it runs the program, and offers the parts of each call to all. The others wait
   in a loop for parts, which come every few microseconds. None is waited for until it has taken a part, so a thread
   that arrives late, or never, changes nothing but the time.

   The scheduler may put a thread on the leader's core while another is idle, where it waits for some milliseconds:
   longer than a small model decodes a batch. So a leader that comes alone lets others run once, a thread that finds
   itself on its core moves, and one that has waited for long lets others run.

   The leader takes parts from the first one on, the others from the last one back. So each has about the same rows, or
   the same weights, in every call, and finds them in its own cache. */
#define _GNU_SOURCE
#include <immintrin.h>
#include <sched.h>
#include <sys/sysinfo.h>

#include "program.h"

enum { LINE = 64, PATIENCE = 1 << 10 /* times that a thread looks for what it waits for until it lets others run */ };

struct Team {
    void (*leader)(void *, Team *);
    void *leading;
    int arrived, ended, core; /* the leader's */
    void (*body)(void *, size_t);
    void *given;
    /* The first part that nobody has taken, and, in the upper half, the end of these: in one number, so that a thread
       never takes a part of one call for that of another. */
    _Alignas(LINE) uint64_t offered;
    _Alignas(LINE) size_t done;
};

static size_t end_of(uint64_t offered) { return offered >> 32; }
static size_t next_of(uint64_t offered) { return (uint32_t)offered; }

static void wait_longer(unsigned *waited) {
    _mm_pause();
    if (++*waited % PATIENCE == 0) sched_yield();
}

/* Moves the calling thread from the leader's core, if it may run on another. */
static void leave_leader(const Team *team) {
    cpu_set_t allowed, others;
    int core = sched_getcpu();
    if (core != __atomic_load_n(&team->core, __ATOMIC_RELAXED) || core < 0 || core >= CPU_SETSIZE) return;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (CPU_COUNT(&others) && !sched_setaffinity(0, sizeof others, &others))
        sched_setaffinity(0, sizeof allowed, &allowed);
}

static void take_parts(Team *team, int leads) {
    uint64_t offered = __atomic_load_n(&team->offered, __ATOMIC_ACQUIRE);
    while (next_of(offered) < end_of(offered)) {
        uint64_t left = leads ? offered + 1 : offered - ((uint64_t)1 << 32);
        if (!__atomic_compare_exchange_n(&team->offered, &offered, left, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) continue;
        team->body(team->given, leads ? next_of(offered) : end_of(left)); /* which stay until all parts are done */
        __atomic_fetch_add(&team->done, 1, __ATOMIC_RELEASE);
        offered = __atomic_load_n(&team->offered, __ATOMIC_ACQUIRE);
    }
}

size_t team_size(const Team *team) { return (size_t)__atomic_load_n(&team->arrived, __ATOMIC_RELAXED); }

void run_in_team(Team *team, void (*body)(void *, size_t), size_t count, void *given) {
    if (count == 1) {
        body(given, 0);
        return;
    }
    team->body = body, team->given = given;
    __atomic_store_n(&team->core, sched_getcpu(), __ATOMIC_RELAXED);
    __atomic_store_n(&team->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->offered, (uint64_t)count << 32, __ATOMIC_RELEASE);
    take_parts(team, 1);
    for (unsigned waited = 0; __atomic_load_n(&team->done, __ATOMIC_ACQUIRE) != count;) wait_longer(&waited);
}

static void join(void *given, size_t number) {
    (void)number;
    Team *team = given;
    if (__atomic_fetch_add(&team->arrived, 1, __ATOMIC_ACQ_REL)) {
        for (unsigned waited = 0; !__atomic_load_n(&team->ended, __ATOMIC_ACQUIRE); wait_longer(&waited)) {
            leave_leader(team);
            take_parts(team, 0);
        }
        return;
    }
    __atomic_store_n(&team->core, sched_getcpu(), __ATOMIC_RELAXED);
    if (team_size(team) == 1) sched_yield();
    team->leader(team->leading, team);
    __atomic_store_n(&team->ended, 1, __ATOMIC_RELEASE);
}

void run_together(void *context, void (*leader)(void *, Team *), void *given) {
    Team team = {.leader = leader, .leading = given, .core = -1};
    static size_t known;
    size_t cores = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!cores) __atomic_store_n(&known, cores = (size_t)get_nprocs(), __ATOMIC_RELAXED);
    Status failed = in_parallel(context, join, cores > 1 ? cores : 2, &team); /* most threads that can be there */
    if (failed || !team.ended) leader(given, &team);
}
