/* Hides instruction sets from a process, so that libraries that ask the processor itself take their other kernels.

   cc -shared -fPIC -O1 -o fewer.so fewer_instructions.c
   LD_PRELOAD=./fewer.so SEQ2ENGINE_HIDE=avx512 python ...       also: avx2 (and all above it)

   Linux lets a process trap its own CPUID (arch_prctl ARCH_SET_CPUID; a processor with cpuid_fault). Every CPUID then
   raises SIGSEGV; the handler below lets it through once and clears bits of the answer. The kernel hands the trap on to
   threads and takes it away at exec, where LD_PRELOAD brings it back. Another handler of SIGSEGV must not be installed
   (pytest -p no:faulthandler). */
#define _GNU_SOURCE
#include <asm/prctl.h>
#include <cpuid.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

static int hide_avx512, hide_avx2;

static void trap(int on) { syscall(SYS_arch_prctl, ARCH_SET_CPUID, !on); }

static void answer(int number, siginfo_t *info, void *context) {
    greg_t *r = ((ucontext_t *)context)->uc_mcontext.gregs;
    const unsigned char *at = (const unsigned char *)r[REG_RIP];
    if (at[0] != 0x0f || at[1] != 0xa2) { /* no CPUID: a real fault, which now ends the process */
        signal(SIGSEGV, SIG_DFL);
        return;
    }
    unsigned leaf = r[REG_RAX], sub = r[REG_RCX], a, b, c, d;
    trap(0);
    __cpuid_count(leaf, sub, a, b, c, d);
    trap(1);
    if (leaf == 7 && sub == 0 && hide_avx512) {
        b &= ~(1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31);
        c &= ~(1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14);
        d &= ~(1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25);
    }
    if (leaf == 7 && sub == 1 && hide_avx512) a &= ~(1u << 4 | 1u << 5), d &= ~(1u << 4 | 1u << 5 | 1u << 10);
    if (leaf == 7 && sub == 0 && hide_avx2) b &= ~(1u << 5), c &= ~(1u << 9 | 1u << 10);
    if (leaf == 1 && hide_avx2) c &= ~(1u << 12 | 1u << 28 | 1u << 29); /* FMA, AVX, F16C */
    r[REG_RAX] = a, r[REG_RBX] = b, r[REG_RCX] = c, r[REG_RDX] = d;
    r[REG_RIP] += 2;
}

__attribute__((constructor)) static void start(void) {
    const char *what = getenv("SEQ2ENGINE_HIDE");
    if (!what || !*what) return;
    hide_avx2 = !strcmp(what, "avx2");
    hide_avx512 = hide_avx2 || !strcmp(what, "avx512");
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK};
    sigaction(SIGSEGV, &action, NULL);
    if (syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0)) {
        fprintf(stderr, "skipped: this processor cannot hide %s (it has no cpuid_fault); run this on another machine\n", what);
        _exit(77);
    }
}
