/* Shared by the CPU kernels: vector types, element types, the thread pool, and the structures that
 * `engine/kernels/bindings.py` mirrors with ctypes.
 *
 * Vectors are GCC vector extensions, so one source serves AVX-512, AVX2, NEON and plain SSE; VL is the lane count
 * of the widest unit and NV x MR accumulators fill its register file.
 *
 * Numeric contract of every kernel here: float32 accumulation in an order that depends on the shape of the model
 * alone. An output element is one chain of fused multiply-adds over k in ascending order, and attention visits keys
 * in chunks aligned to absolute positions. So results are bit for bit the same however tokens are batched, chunked
 * or spread over threads.
 */
#ifndef ATOM_H
#define ATOM_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define ATOM_ABI 1

#if defined(__AVX512F__)
#define VL 16
#define NV 3
#define MR 8
#define ATOM_ISA "avx512"
#elif defined(__AVX2__)
#define VL 8
#define NV 2
#define MR 6
#define ATOM_ISA "avx2"
#elif defined(__ARM_NEON)
#define VL 4
#define NV 4
#define MR 6
#define ATOM_ISA "neon"
#else
#define VL 4
#define NV 2
#define MR 4
#define ATOM_ISA "generic"
#endif
#define NR (NV * VL) /* columns of a packed weight panel */

typedef float vf __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint32_t vu __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef int32_t vi __attribute__((vector_size(VL * 4), aligned(4), may_alias));
typedef uint16_t vh __attribute__((vector_size(VL * 2), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define CEIL_DIV(a, b) (((a) + (b) - 1) / (b))

enum atom_dtype { ATOM_F32 = 0, ATOM_BF16 = 1 };

INLINE vf splat(float x) { return x - (vf){0}; }
INLINE vf load_f32(const float *p) { return *(const vf *)p; }
INLINE void store_f32(float *p, vf v) { *(vf *)p = v; }
INLINE vf load_bf16(const uint16_t *p) { return (vf)(__builtin_convertvector(*(const vh *)p, vu) << 16); }

INLINE float bf16_to_f32(uint16_t h) {
    union { uint32_t u; float f; } x = {.u = (uint32_t)h << 16};
    return x.f;
}

INLINE uint16_t f32_to_bf16(float f) { /* round to nearest even, as torch does; NaN stays NaN */
    union { float f; uint32_t u; } x = {.f = f};
    if ((x.u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((x.u >> 16) | 0x40);
    return (uint16_t)((x.u + 0x7fffu + ((x.u >> 16) & 1)) >> 16);
}

INLINE float hsum(vf v) { /* a fixed tree */
    float t[VL];
    store_f32(t, v);
    for (int w = VL / 2; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] += t[i + w];
    return t[0];
}

INLINE float hmax(vf v) {
    float t[VL];
    store_f32(t, v);
    for (int w = VL / 2; w; w /= 2)
        for (int i = 0; i < w; i++) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
    return t[0];
}

INLINE vf vmax(vf a, vf b) {
    vi m = a > b;
    return (vf)(((vu)m & (vu)a) | (~(vu)m & (vu)b));
}

/* exp, relative error about 2e-7 (Cephes' polynomial); 0 below -87.3, so that exp(-inf) is exactly 0. */
INLINE vf vexp(vf x) {
    vi under = x < splat(-87.3f);
    vf z = vmax(x, splat(-87.3f));
    z = -vmax(-z, splat(-88.0f));
    vf n = z * splat(1.44269504088896341f) + splat(12582912.0f);
    vi e = (vi)n - 0x4b400000;
    n = n - splat(12582912.0f);
    vf r = z - n * splat(0.693359375f);
    r = r - n * splat(-2.12194440e-4f);
    vf p = splat(1.9875691500e-4f);
    p = p * r + splat(1.3981999507e-3f);
    p = p * r + splat(8.3334519073e-3f);
    p = p * r + splat(4.1665795894e-2f);
    p = p * r + splat(1.6666665459e-1f);
    p = p * r + splat(5.0000001201e-1f);
    p = p * r * r + r + splat(1.0f);
    vf y = p * (vf)((e + 127) << 23);
    return (vf)((vu)y & ~(vu)under);
}

/* ---- threads.c ---- */
typedef struct atom_pool atom_pool;
typedef void (*atom_task)(void *arg, int tid);

atom_pool *atom_pool_create(int num_threads);
void atom_pool_destroy(atom_pool *pool);
/* Run task(arg, tid) on every thread of the pool, the caller being thread 0; returns when all have finished. */
void atom_pool_run(atom_pool *pool, atom_task task, void *arg);
/* Inside a task: wait for all threads, and begin a new set of work items. */
void atom_barrier(atom_pool *pool);
/* Inside a task: the next of n work items since the last barrier, or -1. Every thread takes from a share of its own in
 * order, which keeps it in one region of memory, and then helps the others with theirs. */
int64_t atom_next(atom_pool *pool, int tid, int64_t n);
int atom_pool_size(const atom_pool *pool);

#define FOR_EACH_ITEM(pool, tid, i, n) for (int64_t i; (i = atom_next(pool, tid, n)) >= 0;)

/* ---- gemm.c ---- */
typedef struct {
    const void *data;  /* packed panels, see atom_pack_weight; null: absent */
    const float *bias; /* [n] or null */
    int64_t n;         /* output features */
    int64_t k;         /* input features, even */
} atom_weight;

int64_t atom_packed_bytes(int64_t n, int64_t k, int dtype);
void atom_pack_weight(const void *weight_nk, void *packed, int64_t n, int64_t k, int dtype);
/* Columns of panel p of A[m, k] W^T into out (row stride ldo floats); `scratch` holds ATOM_GEMM_SCRATCH floats. */
void atom_gemm_panel(const atom_weight *w, int dtype, int64_t panel, const float *a, int64_t lda, int64_t m, float *out,
                     int64_t ldo, float *scratch);
#define ATOM_KC 128 /* k per pass over a panel that was converted to float32: 24 KiB, half of a 48 KiB L1 */
#define ATOM_MC 192 /* rows per work item */
#define ATOM_GEMM_SCRATCH (ATOM_KC * NR)

/* ---- attention.c ---- */
typedef struct {
    int64_t num_seqs, num_tokens;
    const int32_t *token_ids;       /* [t]; null for attention alone */
    const int32_t *positions;       /* [t] */
    const int64_t *slots;           /* [t] block * block_size + offset where the token's KV goes */
    const int32_t *query_start;     /* [s + 1] first token of each sequence */
    const int32_t *block_tables;    /* [s, max_blocks] */
    int64_t max_blocks;
    int64_t num_logits;
    const int32_t *logits_rows;     /* [n] tokens whose logits are wanted */
} atom_batch;

typedef struct {
    int64_t num_heads, num_kv_heads, head_dim, block_size;
    int64_t dtype; /* of the cache */
    float scale;
} atom_attention;

#define ATOM_TILE_ROWS 32 /* query rows (token x head of one kv head) that share a pass over the keys */
#define ATOM_CHUNK 64     /* keys per online-softmax step, aligned to absolute positions */
#define ATOM_MAX_GROUP 64
#define ATOM_MAX_HEAD_DIM 256

/* Up to `count` consecutive tokens of one sequence whose queries share a pass over the keys. */
typedef struct {
    int32_t seq, first, count;
} atom_tile;

/* Fills tiles (at most num_tokens of them) and returns their number. */
int64_t atom_make_tiles(const atom_attention *at, const atom_batch *b, atom_tile *tiles);
/* Floats of scratch that one thread needs. */
int64_t atom_attention_scratch(const atom_attention *at);
void atom_store_kv(const atom_attention *at, int64_t slot, const float *k, const float *v, void *k_cache,
                   void *v_cache);
/* Inside a task: all tiles, shared with the other threads of the pool. q [t, h * hd] has row stride ldq. */
void atom_attend_tiles(atom_pool *pool, int tid, const atom_attention *at, const atom_batch *b, const atom_tile *tiles,
                       int64_t num_tiles, const float *q, int64_t ldq, const void *k_cache, const void *v_cache,
                       float *out, int64_t ldo, float *scratch);

/* ---- sampling.c ---- */
float atom_row_max(const float *x, int64_t n);

/* ---- decoder.c ---- */
typedef struct {
    atom_weight qkv, o, gate, up, down;
    const float *input_norm, *post_norm; /* [d] */
    const float *q_norm, *k_norm;        /* [hd] or null */
    void *k_cache, *v_cache;
} atom_layer;

typedef struct {
    int64_t num_layers, hidden, ffn, vocab;
    int64_t rotary_dim;
    int64_t dtype; /* of weights */
    float eps;
    float embed_scale;
    atom_attention attention;
    const void *embedding;  /* [v, d], or null: rows are read back from the packed lm_head */
    const float *cos, *sin; /* [max_position, rotary_dim / 2] */
    const float *final_norm;
    atom_weight lm_head;
    const atom_layer *layers;
} atom_model;

#endif
