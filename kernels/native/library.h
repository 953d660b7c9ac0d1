/* What the instruction sets share: the arguments of the operations, and the limits.
 *
 * All strides count elements. Everything is 64 bits wide, so no offset can overflow.
 */

#ifndef STREETCAR_LIBRARY_H
#define STREETCAR_LIBRARY_H

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline, unused))
/* Called from several places that must agree to the last bit: one copy of the code, so that the
 * compiler decides once which products are fused with a sum. */
#define ONE_COPY static __attribute__((noinline, noclone))
#define EXPORT __attribute__((visibility("default")))

enum {
    TILE = 64,             /* keys scored at once: four AVX-512 vectors */
    PANEL = 64,            /* output features of a packed panel of weights */
    SEGMENT = 512,         /* keys of one independent softmax; a multiple of TILE */
    ASKED_EARLY = 24,      /* values of the next tile that are asked for before the products */
    MAX_HEAD_DIM = 256,    /* what the buffers on the stack are sized by */
    MAX_BLOCK_ROWS = 96,   /* (query, head) rows that share a packed tile of keys */
    MIN_PARALLEL = 16384,  /* fewer elements are not worth waking a second thread for */
    ROTATED = 64,          /* features of a row that are rotated together before rounding */
    ZERO_BYTE = 128,       /* the byte of a quantised row that means 0 */
    MAX_INT8_FEATURES = 65536 /* sums of products of bytes stay within 32 bits */
};

/* What is read in the place of a key or value that is not there. */
static const char NO_ROW[2 * MAX_HEAD_DIM] = {0};

#define SMALLEST_PEAK 1e-30f /* a row of smaller numbers is a row of zeros */

/* What the 32-bit words of a product hold. */
enum { FLOATS = 0, PAIRS = 1, BYTES = 2 };

/* What a KV cache holds: FLOATS; BF16S; or, as kv_bytes says, rows of head_dim signed bytes or e4m3
 * floats and, after them, the float that they are multiplied by. Strides count bytes in the last two
 * cases. kernels/kv_bytes.py has the same numbers. */
enum { BF16S = 1, INT8S = 2, FP8S = 3 };

/* Results of an operation. */
enum { DONE = 0, OUT_OF_MEMORY = 1, BLOCK_OUT_OF_RANGE = 2, NOT_SUPPORTED = 3 };

typedef struct {
    uint8_t *values; /* (rows, features), one row after the other; null: not wanted */
    float *scales;   /* (rows) */
} quantised_rows;

typedef struct {
    const void *q, *k, *v;
    void *out;
    float *lse;
    quantised_rows to; /* out again, quantised; out is then one run of memory */
    const int32_t *cu_seqlens_q, *seqlens_k, *block_table;
    const float *alibi_slopes, *sinks;
    int64_t q_row, q_head;
    int64_t k_block, k_slot, k_head;
    int64_t v_block, v_slot, v_head;
    int64_t out_row, out_head;
    int64_t lse_row;
    int64_t table_row, table_width;
    int64_t num_seqs, num_heads, num_kv_heads, head_dim, num_blocks, block_size;
    int64_t window, causal, is_bf16, kv_bytes, num_threads;
    double scale, softcap;
} attention_arguments;

typedef struct {
    void *qkv;
    const float *cos_sin;
    void *k, *v;
    const int64_t *slots;
    int64_t qkv_row, cos_sin_row;
    int64_t k_block, k_slot, k_head;
    int64_t v_block, v_slot, v_head;
    int64_t num_tokens, num_heads, num_kv_heads, head_dim, rotary_dim, num_blocks, block_size;
    int64_t is_bf16, kv_bytes, num_threads;
} rope_write_kv_arguments;

typedef struct {
    const void *x, *residual, *weight; /* residual may be null */
    void *total, *out;                 /* total is written when there is a residual */
    quantised_rows to;                 /* out again, quantised */
    int64_t x_row, num_rows, hidden_size, is_bf16, num_threads;
    double epsilon;
} rms_norm_arguments;

typedef struct {
    const void *gate_up;
    void *out;
    quantised_rows to; /* out again, quantised */
    int64_t gate_up_row, num_rows, size, is_bf16, num_threads;
} silu_mul_arguments;

typedef struct {
    const void *x, *packed;
    void *out;
    int64_t x_row, out_row, num_rows, in_features, out_features, is_bf16, num_threads;
} linear_arguments;

typedef struct {
    const void *x;
    quantised_rows to;
    int64_t x_row, num_rows, size, is_bf16, num_threads;
} quantise_arguments;

typedef struct {
    quantised_rows x;
    const void *packed;
    const int32_t *start; /* of the sums: (panels * PANEL) */
    const float *scales;  /* of the output features, likewise padded */
    void *out;
    int64_t out_row, num_rows, in_features, out_features, is_bf16, num_threads;
} linear_int8_arguments;

typedef struct {
    const void *panels;   /* as `linear` or `linear_int8` wants them */
    const int32_t *start; /* null: not in 8 bits */
    const float *scales;
    int64_t in_features, out_features;
} matrix_arguments;

typedef struct {
    const void *input_norm, *feed_forward_norm;
    void *k, *v;
    matrix_arguments qkv, attention_output, gate_up, down;
} layer_arguments;

typedef struct {
    const layer_arguments *layers;
    const void *final_norm;
    const float *cos_sin;
    const int64_t *slots;
    const int32_t *cu_seqlens_q, *seqlens_k, *block_table;
    void *residual; /* comes with the embeddings */
    void *normed, *qkv, *mixed, *moved, *gate_up, *activated;
    quantised_rows normed_bytes, mixed_bytes, activated_bytes; /* null: not in 8 bits */
    int64_t num_layers, num_tokens, num_seqs, table_row, table_width;
    int64_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rotary_dim;
    int64_t k_block, k_slot, k_head;
    int64_t v_block, v_slot, v_head;
    int64_t num_blocks, block_size, is_bf16, kv_bytes, num_threads;
    double epsilon, scale;
} decoder_arguments;

typedef struct {
    const void *memory;
    float *sum; /* so that nothing is left out */
    int64_t num_bytes, num_threads;
} read_memory_arguments;

typedef struct {
    float *sum, *products;
    int64_t kind, rounds, num_threads;
} multiply_registers_arguments;

typedef struct {
    const void *logits;
    int64_t *tokens;
    uint8_t *finite;
    int64_t logits_row, num_rows, vocab_size, is_bf16, num_threads;
} greedy_arguments;

#endif
