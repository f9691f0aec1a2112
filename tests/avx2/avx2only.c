/* Preloaded into a command: its processor has AVX2, and no AVX-512, VNNI or AMX.
 *
 * Only the kernel could hide features from `cpuid`, and few machines' kernels may. So `__main__.py` puts
 * UD0, an instruction that no processor has, in place of each `cpuid` of a copy of ONNX Runtime, and the
 * signal that it raises is answered here. The file of AVX2_CPUINFO is read as /proc/cpuinfo.
 *
 * With AVX2_EVERYWHERE the kernel is asked to let `cpuid` itself fail, in all libraries, where it can. Its signal
 * is the one of wrong addresses, which programs under test need for themselves.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

/* Bits of leaf 7: https://en.wikipedia.org/wiki/CPUID#EAX=7,_ECX=0:_Extended_Features */
static const uint32_t HIDDEN_EBX = /* AVX-512 F, DQ, IFMA, PF, ER, CD, BW, VL */
    1u << 16 | 1u << 17 | 1u << 21 | 1u << 26 | 1u << 27 | 1u << 28 | 1u << 30 | 1u << 31;
static const uint32_t HIDDEN_ECX = /* AVX-512 VBMI, VBMI2, VNNI, BITALG, VPOPCNTDQ */
    1u << 1 | 1u << 6 | 1u << 11 | 1u << 12 | 1u << 14;
static const uint32_t HIDDEN_EDX = /* AVX-512 4VNNIW, 4FMAPS, VP2INTERSECT; AMX BF16; AVX-512 FP16; AMX TILE, INT8 */
    1u << 2 | 1u << 3 | 1u << 8 | 1u << 22 | 1u << 23 | 1u << 24 | 1u << 25;
static const uint32_t HIDDEN_EAX_1 = /* AVX-VNNI, AVX-512 BF16, AMX FP16, AVX-IFMA */
    1u << 4 | 1u << 5 | 1u << 21 | 1u << 23;
static const uint32_t HIDDEN_EDX_1 = /* AVX-VNNI-INT8, AVX-NE-CONVERT, AMX COMPLEX, AVX-VNNI-INT16, AVX10 */
    1u << 4 | 1u << 5 | 1u << 8 | 1u << 10 | 1u << 19;
static const uint32_t HIDDEN_STATE = 0x600e0u; /* registers of AVX-512 and AMX, of leaf 13 */

#define ARCH_SET_CPUID 0x1012

static int hides_everywhere;
static int (*next_sigaction)(int, const struct sigaction *, struct sigaction *);
static int (*next_open)(const char *, int, ...);

static void answer(int number, siginfo_t *info, void *context)
{
    greg_t *registers = ((ucontext_t *)context)->uc_mcontext.gregs;
    const uint8_t *instruction = (const uint8_t *)registers[REG_RIP];
    uint32_t leaf = registers[REG_RAX], subleaf = registers[REG_RCX];
    uint32_t a = leaf, b, c = subleaf, d;
    (void)info;
    if (instruction[0] != 0x0f || instruction[1] != (number == SIGSEGV ? 0xa2 : 0xff)) { /* the program dies of it */
        struct sigaction usual = {.sa_handler = SIG_DFL};
        next_sigaction(number, &usual, NULL);
        return;
    }
    if (hides_everywhere)
        syscall(SYS_arch_prctl, ARCH_SET_CPUID, 1UL);
    __asm__ volatile("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
    if (hides_everywhere)
        syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0UL);
    if (leaf == 7 && subleaf == 0) {
        b &= ~HIDDEN_EBX;
        c &= ~HIDDEN_ECX;
        d &= ~HIDDEN_EDX;
    }
    if (leaf == 7 && subleaf == 1) {
        a &= ~HIDDEN_EAX_1;
        d &= ~HIDDEN_EDX_1;
    }
    if (leaf == 13 && subleaf == 0)
        a &= ~HIDDEN_STATE;
    registers[REG_RAX] = a;
    registers[REG_RBX] = b;
    registers[REG_RCX] = c;
    registers[REG_RDX] = d;
    registers[REG_RIP] += 2;
}

__attribute__((constructor)) static void begin(void)
{
    struct sigaction action = {.sa_sigaction = answer, .sa_flags = SA_SIGINFO | SA_NODEFER};
    next_sigaction = dlsym(RTLD_NEXT, "sigaction");
    next_open = dlsym(RTLD_NEXT, "open");
    next_sigaction(SIGILL, &action, NULL);
    if (getenv("AVX2_EVERYWHERE") == NULL)
        return;
    next_sigaction(SIGSEGV, &action, NULL);
    hides_everywhere = syscall(SYS_arch_prctl, ARCH_SET_CPUID, 0UL) == 0;
}

/* Nobody takes the signals away: Python's faulthandler, which pytest turns on, would. */
int sigaction(int number, const struct sigaction *action, struct sigaction *old)
{
    if (next_sigaction == NULL)
        next_sigaction = dlsym(RTLD_NEXT, "sigaction");
    int ours = number == SIGILL || (number == SIGSEGV && hides_everywhere);
    return next_sigaction(number, ours ? NULL : action, old);
}

int open(const char *path, int flags, ...)
{
    const char *features = getenv("AVX2_CPUINFO");
    va_list rest;
    va_start(rest, flags);
    mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(rest, mode_t) : 0;
    va_end(rest);
    if (next_open == NULL)
        next_open = dlsym(RTLD_NEXT, "open");
    return next_open(features && !strcmp(path, "/proc/cpuinfo") ? features : path, flags, mode);
}

/* Files are of 64 bits anyway on x86-64. */
int open64(const char *path, int flags, ...) __attribute__((alias("open")));
