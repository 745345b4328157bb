/* A team: the threads of a session for the time of one program.

   The thread that arrives first leads: it runs the program, and offers the parts of each call to all. The others wait
   in a loop for parts, which come every few microseconds. None is waited for until it has taken a part, so a thread
   that arrives late, or never, changes nothing but the time. */
#include <immintrin.h>
#include <sys/sysinfo.h>

#include "program.h"

enum { LINE = 64 };

struct Team {
    void (*leader)(void *, Team *);
    void *leading;
    int arrived, ended;
    void (*body)(void *, size_t);
    void *given;
    /* How many parts are offered, and the next one: in one number, so that a thread never takes a part of one call for
       that of another. */
    _Alignas(LINE) uint64_t offered;
    _Alignas(LINE) size_t done;
};

static size_t count_of(uint64_t offered) { return offered >> 32; }
static size_t next_of(uint64_t offered) { return (uint32_t)offered; }

static void take_parts(Team *team) {
    for (;;) {
        uint64_t offered = __atomic_load_n(&team->offered, __ATOMIC_ACQUIRE);
        if (next_of(offered) >= count_of(offered)) return;
        offered = __atomic_fetch_add(&team->offered, 1, __ATOMIC_ACQ_REL);
        if (next_of(offered) >= count_of(offered)) return;
        team->body(team->given, next_of(offered)); /* which stay until all parts are done */
        __atomic_fetch_add(&team->done, 1, __ATOMIC_RELEASE);
    }
}

void run_in_team(Team *team, void (*body)(void *, size_t), size_t count, void *given) {
    if (count == 1) {
        body(given, 0);
        return;
    }
    team->body = body, team->given = given;
    __atomic_store_n(&team->done, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&team->offered, (uint64_t)count << 32, __ATOMIC_RELEASE);
    take_parts(team);
    while (__atomic_load_n(&team->done, __ATOMIC_ACQUIRE) != count) _mm_pause();
}

static void join(void *given, size_t number) {
    (void)number;
    Team *team = given;
    if (__atomic_fetch_add(&team->arrived, 1, __ATOMIC_ACQ_REL)) {
        while (!__atomic_load_n(&team->ended, __ATOMIC_ACQUIRE)) {
            take_parts(team);
            _mm_pause();
        }
        return;
    }
    team->leader(team->leading, team);
    __atomic_store_n(&team->ended, 1, __ATOMIC_RELEASE);
}

void run_together(void *context, void (*leader)(void *, Team *), void *given) {
    Team team = {.leader = leader, .leading = given};
    static size_t known;
    size_t cores = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!cores) __atomic_store_n(&known, cores = (size_t)get_nprocs(), __ATOMIC_RELAXED);
    Status failed = in_parallel(context, join, cores > 1 ? cores : 2, &team); /* most threads that can be there */
    if (failed || !team.ended) leader(given, &team);
}
