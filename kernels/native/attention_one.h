/* A tile for the rows of a single query, which are few: keys and values are used as they are read.
 *
 * Packing a tile pays where many rows share it. Here the words of LANES keys are turned in
 * registers, and two rows of values are interleaved on their way into the products. The next tile is
 * asked for line by line in between, at an even pace: memory answers so many requests at once and no
 * more, and it must never be without.
 *
 * Invariant: the sums of attend_rows, in the same order, so the same bits. Rows that are not seen
 * read as zeros.
 */

/* Whether a task is one of these: its rows are `rows`. */
INLINE int F(takes_one)(const F(shape) *s, int64_t rows, int64_t queries) {
    const int taken = s->pairs && s->cell == BF16S; /* and neither INT8S nor FP8S */
    return taken && s->q_words % LANES == 0 && rows <= MAX_ROWS && queries == 1;
}

#if ISA_LEVEL >= 4

INLINE void F(ask_for)(const char *row, int64_t byte) { __builtin_prefetch(row + byte, 0, 2); }

/* 8 words, from word i, of LANES rows: lane r of turned[w] is word i + w of row r. Two rows come
 * together while they are loaded, four words by four within a quarter, quarters last. */
INLINE void F(turn)(vf *turned, const char *const *rows, int64_t i) {
    __m512 halves[8], fours[8];
#pragma GCC unroll 8
    for (int n = 0; n < 8; n++) {
        int row = n < 4 ? n : n + 4;
        __m256 low = _mm256_loadu_ps((const float *)rows[row] + i);
        __m256 high = _mm256_loadu_ps((const float *)rows[row + 4] + i);
        halves[n] = _mm512_insertf32x8(_mm512_castps256_ps512(low), high, 1);
    }
#pragma GCC unroll 2
    for (int n = 0; n < 8; n += 4) {
        __m512d a = (__m512d)_mm512_unpacklo_ps(halves[n], halves[n + 1]);
        __m512d b = (__m512d)_mm512_unpackhi_ps(halves[n], halves[n + 1]);
        __m512d c = (__m512d)_mm512_unpacklo_ps(halves[n + 2], halves[n + 3]);
        __m512d d = (__m512d)_mm512_unpackhi_ps(halves[n + 2], halves[n + 3]);
        fours[n] = (__m512)_mm512_unpacklo_pd(a, c);
        fours[n + 1] = (__m512)_mm512_unpackhi_pd(a, c);
        fours[n + 2] = (__m512)_mm512_unpacklo_pd(b, d);
        fours[n + 3] = (__m512)_mm512_unpackhi_pd(b, d);
    }
#pragma GCC unroll 4
    for (int n = 0; n < 4; n++) {
        turned[n] = (vf)_mm512_shuffle_f32x4(fours[n], fours[n + 4], 0x88);
        turned[n + 4] = (vf)_mm512_shuffle_f32x4(fours[n], fours[n + 4], 0xDD);
    }
}

/* (rows, TILE): the products of the queries and the first `count` keys, and of some more. */
INLINE void F(score_one)(
    float *scores, const float *q, const F(tile_rows) *now, const F(tile_rows) *next,
    int64_t count, int64_t words, const int rows) {
    /* A product waits six cycles for the one before it: some six sums are needed at a time. */
    const int groups = rows <= 2 ? 2 : 1;
    int64_t key = 0;
    for (; key < count; key += groups * LANES) {
        vf sums[2][MAX_ROWS];
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++) sums[g][r] = (vf){0};
        for (int64_t i = 0; i < words; i += 8) {
            vf turned[2][8];
#pragma GCC unroll 2
            for (int g = 0; g < groups; g++)
                F(turn)(turned[g], now->keys + key + g * LANES, i);
            const char *const *asked = next->keys + key + (i & 8);
#pragma GCC unroll 8
            for (int w = 0; w < 8; w++) {
#pragma GCC unroll 2
                for (int g = 0; g < groups; g++)
                    F(ask_for)(asked[g * LANES + w], 4 * (i & ~(int64_t)8));
#pragma GCC unroll 6
                for (int r = 0; r < rows; r++) {
                    vf word = F(splat_word)(q + r * words + i + w);
#pragma GCC unroll 2
                    for (int g = 0; g < groups; g++)
                        sums[g][r] = F(multiply_add)(sums[g][r], word, turned[g][w], PAIRS);
                }
            }
        }
#pragma GCC unroll 2
        for (int g = 0; g < groups; g++)
#pragma GCC unroll 6
            for (int r = 0; r < rows; r++)
                F(store)(scores + r * TILE + key + g * LANES, sums[g][r]);
    }
    for (; key < TILE; key++)
        for (int64_t i = 0; i < words; i += LANES) F(ask_for)(next->keys[key], 4 * i);
}

/* sums = sums * factors + weights . values, for 4 * LANES dimensions from `dim`, or half of them. */
INLINE void F(mix_some)(
    const F(scratch) *w, const float *weights, const float *factors, const F(tile_rows) *now,
    const F(tile_rows) *next, int64_t count, int64_t dim, int64_t padded, const int rows,
    const int vectors) {
    __m512i low, high;
    {
        uint16_t index[2][2 * LANES];
        for (int i = 0; i < 2 * LANES; i++) {
            index[0][i] = (uint16_t)(i / 2 + (i & 1) * 2 * LANES);
            index[1][i] = (uint16_t)(index[0][i] + LANES);
        }
        memcpy(&low, index[0], sizeof low);
        memcpy(&high, index[1], sizeof high);
    }
    vf sums[MAX_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            sums[r][n] = F(load)(w->sums + r * padded + dim + n * LANES) * factors[r];
    int64_t asked = ASKED_EARLY;
    for (int64_t key = 0; key < count; key += 2) {
        vf pairs[4];
#pragma GCC unroll 2
        for (int n = 0; n < vectors; n += 2) {
            int64_t byte = 2 * (dim + n * LANES);
            __m512i even = _mm512_loadu_si512(now->values[key] + byte);
            __m512i odd = _mm512_loadu_si512(now->values[key + 1] + byte);
            pairs[n] = (vf)_mm512_permutex2var_epi16(even, low, odd);
            pairs[n + 1] = (vf)_mm512_permutex2var_epi16(even, high, odd);
        }
        int64_t due = ASKED_EARLY + (key + 2) * (TILE - ASKED_EARLY) / TILE;
        for (; asked < due; asked++)
            for (int n = 0; n < vectors; n += 2)
                F(ask_for)(next->values[asked], 2 * (dim + n * LANES));
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vf weight = F(splat_word)(weights + r * TILE + key / 2);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++)
                sums[r][n] = F(multiply_add)(sums[r][n], weight, pairs[n], PAIRS);
        }
    }
    for (; asked < TILE; asked++)
        for (int n = 0; n < vectors; n += 2)
            F(ask_for)(next->values[asked], 2 * (dim + n * LANES));
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            F(store)(w->sums + r * padded + dim + n * LANES, sums[r][n]);
}

INLINE void F(mix_one)(
    const F(scratch) *w, const float *weights, const float *factors, const F(tile_rows) *now,
    const F(tile_rows) *next, int64_t count, int64_t head_dim, const int rows) {
    int64_t dim = 0;
    for (; dim + 4 * LANES <= head_dim; dim += 4 * LANES)
        F(mix_some)(w, weights, factors, now, next, count, dim, head_dim, rows, 4);
    if (dim < head_dim)
        F(mix_some)(w, weights, factors, now, next, count, dim, head_dim, rows, 2);
}

/* One tile of a task with one query; `seen` counts from the start of the tile. */
INLINE void F(attend_one_typed)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w,
    const F(tile_rows) *now, const F(tile_rows) *next, F(span) seen, int64_t position,
    int64_t count, const int rows) {
    float scores[MAX_ROWS * TILE], factors[MAX_ROWS];
    F(score_one)(scores, w->q, now, next, count, s->q_words, rows);
    int64_t asked = 0;
    for (int r = 0; r < rows; r++) {
        for (; asked < ASKED_EARLY * (r + 1) / rows; asked++)
            for (int64_t i = 0; i < s->q_words; i += LANES)
                F(ask_for)(next->values[asked], 4 * i);
        factors[r] = F(weigh)(scores + r * TILE, w->peaks + r, w->denominators + r, a, w,
                              t->kv_head * s->group + r, position, seen, count, 1);
    }
    F(mix_one)(w, scores, factors, now, next, count, a->head_dim, rows);
}

static void F(attend_one)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w,
    const F(tile_rows) *now, const F(tile_rows) *next, int64_t tile, int64_t count, int rows) {
    F(span) seen = F(visible)(a, t->seq, t->first_query);
    seen.first -= tile;
    seen.end -= tile;
    int64_t position =
        a->seqlens_k[t->seq] - F(seqlen_q)(a, t->seq) + t->first_query - tile;
    switch (rows) {
        case 1: F(attend_one_typed)(a, t, s, w, now, next, seen, position, count, 1); break;
        case 2: F(attend_one_typed)(a, t, s, w, now, next, seen, position, count, 2); break;
        case 3: F(attend_one_typed)(a, t, s, w, now, next, seen, position, count, 3); break;
        case 4: F(attend_one_typed)(a, t, s, w, now, next, seen, position, count, 4); break;
        case 5: F(attend_one_typed)(a, t, s, w, now, next, seen, position, count, 5); break;
        default: F(attend_one_typed)(a, t, s, w, now, next, seen, position, count, 6); break;
    }
}

#endif
