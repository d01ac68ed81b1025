/* Linear layers: out[m, n] = a[m, k] w[n, k]^T + bias, with float32 activations and accumulation.
 *
 * Weights are packed once into panels of NR output features: [panel][k][NR] float32, or [panel][k/2][NR][2] bfloat16.
 * A 32-bit lane of the latter holds two consecutive k of one feature; a shift and a mask turn it into two floats, which
 * costs less than widening. Up to MR rows read the panel directly (such a step is bound by the bytes of the weights).
 * With more rows the first MR of them leave ATOM_KC x NR of the panel widened in L1 for the others. All add over k in
 * the same order, see atom.h. */
#include "atom.h"

#include <string.h>

int64_t atom_packed_bytes(int64_t n, int64_t k, int dtype) {
    return CEIL_DIV(n, NR) * NR * k * (dtype == ATOM_BF16 ? 2 : 4);
}

void atom_pack_weight(const void *weight_nk, void *packed, int64_t n, int64_t k, int dtype) {
    int64_t panels = CEIL_DIV(n, NR);
    memset(packed, 0, (size_t)atom_packed_bytes(n, k, dtype));
    for (int64_t p = 0; p < panels; p++) {
        for (int64_t j = 0; j < NR && p * NR + j < n; j++) {
            if (dtype == ATOM_BF16) {
                const uint32_t *src = (const uint32_t *)((const uint16_t *)weight_nk + (p * NR + j) * k);
                uint32_t *dst = (uint32_t *)packed + p * NR * (k / 2) + j;
                for (int64_t i = 0; i < k / 2; i++) dst[i * NR] = src[i];
            } else {
                const float *src = (const float *)weight_nk + (p * NR + j) * k;
                float *dst = (float *)packed + p * NR * k + j;
                for (int64_t i = 0; i < k; i++) dst[i * NR] = src[i];
            }
        }
    }
}

#define PREFETCH_ROWS 32 /* measured: 6 KiB ahead, into L2, reaches 88% of the bandwidth of a plain sum */

/* c[rows, NR] (+)= a[rows, k] b[k, NR], b float32; `streamed`: b comes from memory and is worth prefetching. */
INLINE void micro_f32(const int rows, const int streamed, const float *a, int64_t lda, const float *b, int64_t k,
                      float *c, int64_t ldc, int first) {
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = first ? splat(0) : load_f32(c + r * ldc + v * VL);
    for (int64_t i = 0; i < k; i++) {
        vf bv[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            if (streamed) __builtin_prefetch(b + (i + PREFETCH_ROWS) * NR + v * VL, 0, 2);
            bv[v] = load_f32(b + i * NR + v * VL);
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = splat(a[r * lda + i]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] += x * bv[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store_f32(c + r * ldc + v * VL, acc[r][v]);
}

/* c[rows, NR] (+)= a[rows, k] b[k, NR], b packed bfloat16 pairs; `widen`: also leave b as float32 in `wide`. */
INLINE void micro_bf16(const int rows, const int widen, const float *a, int64_t lda, const uint32_t *b, int64_t k,
                       float *c, int64_t ldc, int first, float *wide) {
    vf acc[MR][NV];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) acc[r][v] = first ? splat(0) : load_f32(c + r * ldc + v * VL);
    for (int64_t i = 0; i < k / 2; i++) {
        vf even[NV], odd[NV];
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) {
            __builtin_prefetch(b + (i + PREFETCH_ROWS) * NR + v * VL, 0, 2);
            vu raw = *(const vu *)(b + i * NR + v * VL);
            even[v] = (vf)(raw << 16);
            odd[v] = (vf)(raw & 0xffff0000u);
            if (widen) {
                store_f32(wide + 2 * i * NR + v * VL, even[v]);
                store_f32(wide + (2 * i + 1) * NR + v * VL, odd[v]);
            }
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = splat(a[r * lda + 2 * i]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] += x * even[v];
        }
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf x = splat(a[r * lda + 2 * i + 1]);
#pragma GCC unroll 4
            for (int v = 0; v < NV; v++) acc[r][v] += x * odd[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < NV; v++) store_f32(c + r * ldc + v * VL, acc[r][v]);
}

#define ROWS_SWITCH(rows, CALL)          \
    switch (rows) {                      \
        case 1: CALL(1); break;          \
        case 2: CALL(2); break;          \
        case 3: CALL(3); break;          \
        case 4: CALL(4); break;          \
        case 5: CALL(MIN(5, MR)); break; \
        case 6: CALL(MIN(6, MR)); break; \
        case 7: CALL(MIN(7, MR)); break; \
        case 8: CALL(MIN(8, MR)); break; \
        default: __builtin_unreachable(); \
    }

#define NOINLINE static __attribute__((noinline)) void

NOINLINE rows_f32(int rows, const float *a, int64_t lda, const float *b, int64_t k, float *c, int64_t ldc, int first) {
#define CALL(R) micro_f32(R, 0, a, lda, b, k, c, ldc, first)
    ROWS_SWITCH(rows, CALL)
#undef CALL
}

NOINLINE rows_f32_streamed(int rows, const float *a, int64_t lda, const float *b, int64_t k, float *c, int64_t ldc,
                           int first) {
#define CALL(R) micro_f32(R, 1, a, lda, b, k, c, ldc, first)
    ROWS_SWITCH(rows, CALL)
#undef CALL
}

NOINLINE rows_bf16(int rows, const float *a, int64_t lda, const uint32_t *b, int64_t k, float *c, int64_t ldc) {
#define CALL(R) micro_bf16(R, 0, a, lda, b, k, c, ldc, 1, NULL)
    ROWS_SWITCH(rows, CALL)
#undef CALL
}

NOINLINE rows_bf16_widen(int rows, const float *a, int64_t lda, const uint32_t *b, int64_t k, float *c, int64_t ldc,
                         int first, float *wide) {
#define CALL(R) micro_bf16(R, 1, a, lda, b, k, c, ldc, first, wide)
    ROWS_SWITCH(rows, CALL)
#undef CALL
}

/* Rows are at most ATOM_MC. Always writes NR columns into out, which the caller provides. */
void atom_gemm_panel(const atom_weight *w, int dtype, int64_t panel, const float *a, int64_t lda, int64_t m, float *out,
                     int64_t ldo, float *scratch) {
    int64_t k = w->k, blocks = CEIL_DIV(m, MR), rows = CEIL_DIV(m, blocks);
    if (dtype == ATOM_BF16 && blocks == 1) {
        rows_bf16((int)m, a, lda, (const uint32_t *)w->data + panel * NR * (k / 2), k, out, ldo);
    } else {
        for (int64_t k0 = 0; k0 < k; k0 += ATOM_KC) {
            int64_t kc = MIN(ATOM_KC, k - k0);
            const float *b = scratch, *ak = a + k0;
            if (dtype == ATOM_BF16) {
                const uint32_t *pairs = (const uint32_t *)w->data + (panel * (k / 2) + k0 / 2) * NR;
                rows_bf16_widen((int)rows, ak, lda, pairs, kc, out, ldo, k0 == 0, scratch);
            } else {
                b = (const float *)w->data + (panel * k + k0) * NR;
                rows_f32_streamed((int)rows, ak, lda, b, kc, out, ldo, k0 == 0);
            }
            for (int64_t r = rows; r < m; r += rows)
                rows_f32((int)MIN(rows, m - r), ak + r * lda, lda, b, kc, out + r * ldo, ldo, k0 == 0);
        }
    }
    if (w->bias) {
        int64_t cols = MIN(NR, w->n - panel * NR);
        for (int64_t r = 0; r < m; r++)
            for (int64_t j = 0; j < cols; j++) out[r * ldo + j] += w->bias[panel * NR + j];
    }
}

typedef struct {
    atom_pool *pool;
    const atom_weight *w;
    int dtype;
    const float *a;
    int64_t m;
    float *out;
    float *scratch;
} gemm_task;

static void run_gemm(void *arg, int tid) {
    gemm_task *t = arg;
    float *scratch = t->scratch + (int64_t)tid * (ATOM_GEMM_SCRATCH + ATOM_MC * NR);
    float *tile = scratch + ATOM_GEMM_SCRATCH;
    int64_t panels = CEIL_DIV(t->w->n, NR), row_blocks = CEIL_DIV(t->m, ATOM_MC);
    FOR_EACH_ITEM(t->pool, tid, item, panels * row_blocks) {
        int64_t panel = item % panels, r0 = item / panels * ATOM_MC, rows = MIN(ATOM_MC, t->m - r0);
        atom_gemm_panel(t->w, t->dtype, panel, t->a + r0 * t->w->k, t->w->k, rows, tile, NR, scratch);
        int64_t cols = MIN(NR, t->w->n - panel * NR);
        for (int64_t r = 0; r < rows; r++)
            memcpy(t->out + (r0 + r) * t->w->n + panel * NR, tile + r * NR, (size_t)cols * 4);
    }
}

/* The layer on its own, for tests and measurements: a [m, k] and out [m, n], contiguous. */
void atom_gemm(atom_pool *pool, const atom_weight *w, int dtype, const float *a, int64_t m, float *out,
               float *scratch) {
    gemm_task t = {pool, w, dtype, a, m, out, scratch};
    atom_pool_run(pool, run_gemm, &t);
}

int64_t atom_gemm_scratch(int num_threads) { return (int64_t)num_threads * (ATOM_GEMM_SCRATCH + ATOM_MC * NR); }
