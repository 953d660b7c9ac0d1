/* What the machine can do at best: the other operations are measured against it.
 *
 * Reading goes through memory once, from start to end; products stay in registers.
 */

EXPORT int F(read_memory)(const read_memory_arguments *a) {
    int64_t words = a->num_bytes / 4, pieces = 8 * a->num_threads;
    float total = 0.0f;
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)a->num_threads) reduction(+ : total)
    for (int64_t piece = 0; piece < pieces; piece++) {
        const float *from = (const float *)a->memory + words * piece / pieces / LANES * LANES;
        const float *end = (const float *)a->memory + words * (piece + 1) / pieces / LANES * LANES;
        vf sums[4] = {{0}};
        for (; from + 4 * LANES <= end; from += 4 * LANES)
#pragma GCC unroll 4
            for (int n = 0; n < 4; n++) sums[n] = sums[n] + F(load)(from + n * LANES);
        total += F(sum)(sums[0] + sums[1] + sums[2] + sums[3]);
    }
    *a->sum = total;
    return DONE;
}

INLINE float F(products)(int64_t rounds, const int kind) {
    vf seeds[MAX_ROWS * 2] = {{0}}, sums[MAX_ROWS * 2], a = F(splat)(0.0f), b = F(splat)(0.0f);
    /* Unknown to the compiler, so that nothing is worked out in advance, once or for all rounds. */
    __asm__ volatile("" : "+m"(seeds), "+m"(b));
#pragma GCC unroll 12
    for (int n = 0; n < MAX_ROWS * 2; n++) sums[n] = seeds[n];
    for (int64_t round = 0; round < rounds; round++) {
        __asm__ volatile("" : "+m"(a));
#pragma GCC unroll 12
        for (int n = 0; n < MAX_ROWS * 2; n++) sums[n] = F(multiply_add)(sums[n], a, b, kind);
    }
    vf total = {0};
#pragma GCC unroll 12
    for (int n = 0; n < MAX_ROWS * 2; n++) total = total + sums[n];
    return F(sum)(total);
}

/* *products: how many numbers all threads together multiply and add. */
EXPORT int F(multiply_registers)(const multiply_registers_arguments *a) {
    if (a->kind == PAIRS && ISA_LEVEL < 4) return NOT_SUPPORTED;
    float total = 0.0f;
#pragma omp parallel num_threads((int)a->num_threads) reduction(+ : total)
    {
        if (a->kind == PAIRS)
            total += F(products)(a->rounds, PAIRS);
        else if (a->kind == BYTES)
            total += F(products)(a->rounds, BYTES);
        else
            total += F(products)(a->rounds, FLOATS);
    }
    *a->sum = total;
    *a->products = (float)(a->num_threads * a->rounds * MAX_ROWS * 2) * LANES *
                   (a->kind == PAIRS ? 2 : a->kind == BYTES ? 4 : 1);
    return DONE;
}
