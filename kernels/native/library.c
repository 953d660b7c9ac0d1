/* Streetcar's native operations for CPUs: plain C with a C interface, no Python and no torch.
 *
 * Every operation exists once for each instruction set, as <operation>_<instruction set>; the
 * caller asks `best_isa` once and then calls those. Threads are OpenMP's: loaded after torch, the
 * library shares torch's pool.
 *
 * Device: reads and writes the memory it is given, and allocates what it frees.
 */

#include "library.h"

#define F(name) name##_baseline
#define ISA_LEVEL 0
#include "operations.h"

#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define F(name) name##_avx2
#define ISA_LEVEL 1
#include "operations.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq")
#define F(name) name##_avx512
#define ISA_LEVEL 2
#include "operations.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#define F(name) name##_avx512vnni
#define ISA_LEVEL 3
#include "operations.h"
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx512vbmi")
#define F(name) name##_avx512bf16
#define ISA_LEVEL 4
#include "operations.h"
#pragma GCC pop_options
#endif

/* The fastest instruction set that this processor and its operating system run. */
EXPORT const char *best_isa(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    int avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                 __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    int vnni = avx512 && __builtin_cpu_supports("avx512vnni");
    if (vnni && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi"))
        return "avx512bf16";
    if (vnni) return "avx512vnni";
    if (avx512) return "avx512";
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return "avx2";
#endif
    return "baseline";
}
