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
    int64_t whole = s->cell >= INT8S ? 2 * LANES : LANES;
    return s->pairs && s->q_words % whole == 0 && rows <= MAX_ROWS && queries == 1;
}

#if ISA_LEVEL >= 4

INLINE void F(ask_for)(const char *row, int64_t byte) { __builtin_prefetch(row + byte, 0, 2); }

/* Asks for 64 dimensions of the nth row from `dim` on, fewer at its end. Rows of bytes overlap
 * lines of memory, and lie one after the other in blocks: what ends one row begins the next, but
 * for the last. */
INLINE void F(ask_for_part)(
    const char *const *rows, int64_t nth, int64_t dim, int64_t head_dim, const int cell) {
    const char *row = rows[nth];
    if (cell >= INT8S) {
        F(ask_for)(row, dim);
        if (nth % 16 == 15 && dim + 64 >= head_dim) F(ask_for)(row, head_dim + 3);
    } else {
        F(ask_for)(row, 2 * dim);
        if (dim + 32 < head_dim) F(ask_for)(row, 2 * dim + 64);
    }
}

INLINE void F(ask_for_row)(
    const char *const *rows, int64_t nth, int64_t head_dim, const int cell) {
    for (int64_t dim = 0; dim < head_dim; dim += 64) F(ask_for_part)(rows, nth, dim, head_dim, cell);
}

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

/* What turns signed bytes above -128, or e4m3, into bfloat16: the bytes of the 128 numbers that are
 * not negative, and how lower and upper ones are put together: four neighbours of a lane, or all in
 * their order. */
typedef struct F(widening) {
    __m512i low[2], high[2], of_lane[2], in_order[2];
} F(widening);

INLINE F(widening) F(prepare_widening)(const int cell) {
    F(widening) w;
    vi lane = F(iota)();
    vb low[8], high[8];
    for (int n = 0; n < 8; n++) {
        vi number = lane + n * LANES;
        vu bits = (vu)(cell == FP8S ? F(from_e4m3)(number) : F(to_float)(number));
        low[n] = F(to_bytes)((vi)(bits >> 16));
        high[n] = F(to_bytes)((vi)(bits >> 24));
    }
    memcpy(w.low, low, sizeof low);
    memcpy(w.high, high, sizeof high);
    /* From two registers, bytes 0, 64, 1 and 65 and so on: two numbers of 16 bits. */
    for (int n = 0; n < 2; n++) {
        w.of_lane[n] = (__m512i)(lane * 0x04040404 + 0x41014000 + n * 0x02020202);
        w.in_order[n] = (__m512i)(lane * 0x02020202 + 0x41014000 + n * 0x20202020);
    }
    return w;
}

/* 64 bytes as bfloat16, in two registers. */
INLINE void F(widen)(
    vf *wide, __m512i bytes, const F(widening) *w, const __m512i *together, const int cell) {
    /* The highest bit of an index is not looked at. */
    __m512i size = cell == FP8S ? bytes : _mm512_abs_epi8(bytes);
    __m512i sign = _mm512_set1_epi8((char)0x80);
    __m512i low = _mm512_permutex2var_epi8(w->low[0], size, w->low[1]);
    __m512i high = _mm512_permutex2var_epi8(w->high[0], size, w->high[1]);
    high = _mm512_ternarylogic_epi32(high, bytes, sign, 0xF8); /* high | (bytes & sign) */
    wide[0] = (vf)_mm512_permutex2var_epi8(low, together[0], high);
    wide[1] = (vf)_mm512_permutex2var_epi8(low, together[1], high);
}

/* sums += q . keys for one word of the queries. */
INLINE void F(add_word)(vf *sums, const float *q, int64_t words, vf keys, const int rows) {
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
        sums[r] = F(multiply_add)(sums[r], F(splat_word)(q + r * words), keys, PAIRS);
}

/* (rows, TILE): the products of the queries and the first `count` keys, rounded up to LANES. */
INLINE void F(score_one)(
    float *scores, const float *q, const F(tile_rows) *now, const F(tile_rows) *next,
    int64_t count, int64_t words, const F(widening) *wider, const int rows, const int cell) {
    const int per_load = cell >= INT8S ? 2 : 1;
    int64_t key = 0, head_dim = 2 * words;
    for (; key < count; key += LANES) {
        vf sums[MAX_ROWS];
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) sums[r] = (vf){0};
        for (int64_t i = 0; i < words; i += 8 * per_load) {
            vf turned[8];
            F(turn)(turned, now->keys + key, i / per_load);
            /* Two turns for each line of memory: each asks for half of the rows. */
            int second = i / per_load & 8;
            const char *const *asked = next->keys + key + second;
            int64_t dim = 2 * i - (second ? 16 * per_load : 0);
#pragma GCC unroll 8
            for (int w = 0; w < 8; w++) {
                const float *at = q + i + w * per_load;
                F(ask_for)(asked[w], cell >= INT8S ? dim : 2 * dim);
                if (cell >= INT8S) {
                    vf wide[2];
                    if (w == 7 && dim + 4 * LANES >= head_dim)
                        F(ask_for)(asked[w], head_dim + 3);
                    F(widen)(wide, (__m512i)turned[w], wider, wider->of_lane, cell);
                    F(add_word)(sums, at, words, wide[0], rows);
                    F(add_word)(sums, at + 1, words, wide[1], rows);
                } else {
                    F(add_word)(sums, at, words, turned[w], rows);
                }
            }
        }
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) F(store)(scores + r * TILE + key, sums[r]);
    }
    for (; key < TILE; key++)
        F(ask_for_row)(next->keys, key, head_dim, cell);
}

/* Dimensions of two rows, a pair of bfloat16 in each word: `vectors` of them from `dim`. */
INLINE void F(pair_values)(
    vf *pairs, const char *even, const char *odd, int64_t dim, const F(widening) *wider,
    const int vectors, const int cell) {
    if (cell >= INT8S) {
        __m512i a = _mm512_loadu_si512(even + dim), b = _mm512_loadu_si512(odd + dim);
#pragma GCC unroll 2
        for (int n = 0; n < 2; n++) {
            __m512i both = _mm512_permutex2var_epi8(a, wider->in_order[n], b);
            F(widen)(pairs + 2 * n, both, wider, wider->in_order, cell);
        }
        return;
    }
    vi lane = F(iota)(), low = lane | (lane + 32) << 16, high = low + 0x00100010;
#pragma GCC unroll 2
    for (int n = 0; n < vectors; n += 2) {
        int64_t byte = 2 * (dim + n * LANES);
        __m512i a = _mm512_loadu_si512(even + byte), b = _mm512_loadu_si512(odd + byte);
        pairs[n] = (vf)_mm512_permutex2var_epi16(a, (__m512i)low, b);
        pairs[n + 1] = (vf)_mm512_permutex2var_epi16(a, (__m512i)high, b);
    }
}

/* sums = sums * factors + weights . values, for 4 * LANES dimensions from `dim`, or half of them. */
INLINE void F(mix_some)(
    const F(scratch) *w, const float *weights, const float *factors, const F(tile_rows) *now,
    const F(tile_rows) *next, int64_t count, int64_t dim, int64_t head_dim,
    const F(widening) *wider, const int rows, const int vectors, const int cell) {
    vf sums[MAX_ROWS][4];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            sums[r][n] = F(load)(w->sums + r * head_dim + dim + n * LANES) * factors[r];
    int64_t asked = ASKED_EARLY;
    for (int64_t key = 0; key < count; key += 2) {
        vf pairs[4];
        F(pair_values)(pairs, now->values[key], now->values[key + 1], dim, wider, vectors, cell);
        int64_t due = ASKED_EARLY + (key + 2) * (TILE - ASKED_EARLY) / TILE;
        for (; asked < due; asked++) F(ask_for_part)(next->values, asked, dim, head_dim, cell);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            vf weight = F(splat_word)(weights + r * TILE + key / 2);
#pragma GCC unroll 4
            for (int n = 0; n < vectors; n++)
                sums[r][n] = F(multiply_add)(sums[r][n], weight, pairs[n], PAIRS);
        }
    }
    for (; asked < TILE; asked++) F(ask_for_part)(next->values, asked, dim, head_dim, cell);
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int n = 0; n < vectors; n++)
            F(store)(w->sums + r * head_dim + dim + n * LANES, sums[r][n]);
}

/* `weigh` for all rows; the first values of the next tile are asked for meanwhile. */
ONE_COPY void F(weigh_one)(
    float *scores, float *factors, const attention_arguments *a, const F(task) *t,
    const F(shape) *s, const F(scratch) *w, int rows, int64_t tile, int64_t count,
    const F(tile_rows) *next) {
    F(span) seen = F(visible)(a, t->seq, t->first_query);
    seen.first -= tile;
    seen.end -= tile;
    int64_t position =
        a->seqlens_k[t->seq] - F(seqlen_q)(a, t->seq) + t->first_query - tile;
    int64_t asked = 0;
    for (int r = 0; r < rows; r++) {
        for (; asked < ASKED_EARLY * (r + 1) / rows; asked++)
            F(ask_for_row)(next->values, asked, a->head_dim, s->cell);
        factors[r] = F(weigh)(scores + r * TILE, w->peaks + r, w->denominators + r, a, w,
                              t->kv_head * s->group + r, position, seen, count, 1);
    }
}

/* One tile of a task with one query. */
INLINE void F(attend_one_typed)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w,
    const F(tile_rows) *now, const F(tile_rows) *next, int64_t tile, int64_t count,
    const int rows, const int cell) {
    float scores[MAX_ROWS * TILE], factors[MAX_ROWS];
    int64_t head_dim = a->head_dim, dim = 0;
    F(widening) wider;
    if (cell >= INT8S) {
        wider = F(prepare_widening)(cell);
        F(pack_scales)(w->key_scales, now->keys, head_dim);
        F(pack_scales)(w->value_scales, now->values, head_dim);
    }
    F(score_one)(scores, w->q, now, next, count, s->q_words, &wider, rows, cell);
    F(weigh_one)(scores, factors, a, t, s, w, rows, tile, count, next);
    for (; dim + 4 * LANES <= head_dim; dim += 4 * LANES)
        F(mix_some)(w, scores, factors, now, next, count, dim, head_dim, &wider, rows, 4, cell);
    if (cell < INT8S && dim < head_dim)
        F(mix_some)(w, scores, factors, now, next, count, dim, head_dim, &wider, rows, 2, cell);
}

static void F(attend_one)(
    const attention_arguments *a, const F(task) *t, const F(shape) *s, F(scratch) *w,
    const F(tile_rows) *now, const F(tile_rows) *next, int64_t tile, int64_t count, int rows) {
#define TYPED(n, cell) F(attend_one_typed)(a, t, s, w, now, next, tile, count, n, cell)
#define ROWS(n)                                        \
    case n:                                            \
        if (s->cell == INT8S) TYPED(n, INT8S);         \
        else if (s->cell == FP8S) TYPED(n, FP8S);      \
        else TYPED(n, BF16S);                          \
        break;
    switch (rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) }
#undef ROWS
#undef TYPED
}

#endif
