/* Causal attention over the paged cache, float32 arithmetic.
 *
 * Cache of one layer, per block and kv head: keys transposed, [head_dim][block_size], so that lanes run over keys and a
 * dot product needs no horizontal sum; values [block_size][padded head_dim]. Softmax is online, ATOM_CHUNK keys at a
 * time. A query visits the same chunks in the same order whether it is decoded alone or inside a prefill, so its
 * result is the same bit for bit. */
#include "atom.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

INLINE int64_t padded(int64_t head_dim) { return CEIL_DIV(head_dim, 16) * 16; }

typedef struct {
    float *q, *s, *o, *m, *l, *alpha, *kt, *vt;
} buffers;

static int64_t carve(const atom_attention *at, float *base, buffers *w) {
    int64_t rows = MAX(ATOM_TILE_ROWS, at->num_heads / at->num_kv_heads), hd = padded(at->head_dim);
    float *p = base;
    w->q = p, p += rows * hd;
    w->s = p, p += rows * ATOM_CHUNK;
    w->o = p, p += rows * hd;
    w->m = p, p += rows;
    w->l = p, p += rows;
    w->alpha = p, p += rows;
    w->kt = p, p += hd * ATOM_CHUNK;
    w->vt = p, p += hd * ATOM_CHUNK;
    return p - base;
}

int64_t atom_attention_scratch(const atom_attention *at) {
    buffers w;
    return carve(at, (float *)64, &w) + 16;
}

int64_t atom_make_tiles(const atom_attention *at, const atom_batch *b, atom_tile *tiles) {
    int64_t per_tile = MAX(1, ATOM_TILE_ROWS / (at->num_heads / at->num_kv_heads)), n = 0;
    for (int64_t s = 0; s < b->num_seqs; s++)
        for (int32_t t = b->query_start[s]; t < b->query_start[s + 1]; t += (int32_t)per_tile)
            tiles[n++] = (atom_tile){(int32_t)s, t, (int32_t)MIN(per_tile, b->query_start[s + 1] - t)};
    return n;
}

void atom_store_kv(const atom_attention *at, int64_t slot, const float *k, const float *v, void *k_cache,
                   void *v_cache) {
    int64_t bs = at->block_size, g = at->num_kv_heads, hd = at->head_dim, vd = padded(hd);
    int64_t block = slot / bs, offset = slot % bs;
    for (int64_t h = 0; h < g; h++) {
        int64_t ki = (block * g + h) * hd * bs + offset, vi = ((block * g + h) * bs + offset) * vd;
        for (int64_t d = 0; d < hd; d++) {
            if (at->dtype == ATOM_BF16) {
                ((uint16_t *)k_cache)[ki + d * bs] = f32_to_bf16(k[h * hd + d]);
                ((uint16_t *)v_cache)[vi + d] = f32_to_bf16(v[h * hd + d]);
            } else {
                ((float *)k_cache)[ki + d * bs] = k[h * hd + d];
                ((float *)v_cache)[vi + d] = v[h * hd + d];
            }
        }
    }
}

INLINE vf load(const void *base, int64_t i, const int bf16) {
    return bf16 ? load_bf16((const uint16_t *)base + i) : load_f32((const float *)base + i);
}

#define QR 8                        /* query rows per register block */
#define WIDE (VL >= 16 ? 4 : 2)     /* vectors per row of a block of up to QR / 2 rows; larger blocks have 2 */
#define VECTORS(rows) ((rows) <= QR / 2 ? WIDE : 2)

/* s[rows][vectors * VL] = q[rows][hd] . keys; k holds one pointer per VL keys, d-major with the given stride. */
INLINE void score_block(const int rows, const int vectors, const int bf16, const float *q, int64_t ldq,
                        const void *const *k, int64_t stride, int64_t hd, float *s) {
    vf acc[QR][4];
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = splat(0);
    for (int64_t d = 0; d < hd; d++) {
        vf x[4];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) x[v] = load(k[v], d * stride, bf16);
#pragma GCC unroll 8
        for (int r = 0; r < rows; r++) {
            vf y = splat(q[r * ldq + d]);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) acc[r][v] += y * x[v];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(s + r * ATOM_CHUNK + v * VL, acc[r][v]);
}

/* o = o * alpha + p . values for `vectors` groups of VL columns from d0, over segments of consecutive value rows.
 * Groups beyond the last one repeat it, which computes it twice with equal results. */
INLINE void value_block(const int rows, const int vectors, const int bf16, const float *p, const float *alpha,
                        const void *const *segments, int64_t segment_len, int64_t keys, int64_t d0, int64_t vd,
                        float *o, int64_t ldo) {
    vf acc[QR][4];
    int64_t d[4];
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) d[v] = MIN(d0 + v * VL, vd - VL);
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) acc[r][v] = load_f32(o + r * ldo + d[v]) * splat(alpha[r]);
    for (int64_t j0 = 0; j0 < keys; j0 += segment_len) {
        const void *values = segments[j0 / segment_len];
        int64_t n = MIN(segment_len, keys - j0);
        for (int64_t j = 0; j < n; j++) {
            vf x[4];
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) x[v] = load(values, j * vd + d[v], bf16);
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++) {
                vf y = splat(p[r * ATOM_CHUNK + j0 + j]);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) acc[r][v] += y * x[v];
            }
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) store_f32(o + r * ldo + d[v], acc[r][v]);
}

#define QR_SWITCH(rows, CALL)   \
    switch (rows) {             \
        case 1: CALL(1); break; \
        case 2: CALL(2); break; \
        case 3: CALL(3); break; \
        case 4: CALL(4); break; \
        case 5: CALL(5); break; \
        case 6: CALL(6); break; \
        case 7: CALL(7); break; \
        case 8: CALL(8); break; \
        default: __builtin_unreachable(); \
    }

#define INSTANTIATE(NAME, BF16)                                                                                      \
    static __attribute__((noinline)) void score_##NAME(int rows, const float *q, int64_t ldq, const void *const *k,  \
                                                       int64_t stride, int64_t hd, float *s) {                       \
        QR_SWITCH(rows, SCORE_##BF16)                                                                                \
    }                                                                                                                \
    static __attribute__((noinline)) void value_##NAME(int rows, const float *p, const float *alpha,                 \
                                                       const void *const *seg, int64_t len, int64_t keys, int64_t d, \
                                                       int64_t vd, float *o, int64_t ldo) {                          \
        QR_SWITCH(rows, VALUE_##BF16)                                                                                \
    }
#define SCORE_0(R) score_block(R, VECTORS(R), 0, q, ldq, k, stride, hd, s)
#define SCORE_1(R) score_block(R, VECTORS(R), 1, q, ldq, k, stride, hd, s)
#define VALUE_0(R) value_block(R, VECTORS(R), 0, p, alpha, seg, len, keys, d, vd, o, ldo)
#define VALUE_1(R) value_block(R, VECTORS(R), 1, p, alpha, seg, len, keys, d, vd, o, ldo)
INSTANTIATE(f32, 0)
INSTANTIATE(bf16, 1)

/* One softmax step of one row: scores become weights; returns the factor for what was accumulated before. */
static float softmax_step(float *s, int64_t visible, float *m, float *l) {
    if (visible <= 0) {
        memset(s, 0, ATOM_CHUNK * sizeof *s);
        return 1.0f;
    }
    for (int64_t j = visible; j < ATOM_CHUNK; j++) s[j] = -INFINITY;
    vf top = load_f32(s);
    for (int j = VL; j < ATOM_CHUNK; j += VL) top = vmax(top, load_f32(s + j));
    float new_m = hmax(top);
    if (*m > new_m) new_m = *m;
    vf sum = splat(0);
    for (int j = 0; j < ATOM_CHUNK; j += VL) {
        vf e = vexp(load_f32(s + j) - splat(new_m));
        store_f32(s + j, e);
        sum += e;
    }
    float alpha = vexp(splat(*m - new_m))[0];
    *l = *l * alpha + hsum(sum);
    *m = new_m;
    return alpha;
}

/* Where the chunk's keys and values are: straight in the cache, or widened into w->kt and w->vt. */
typedef struct {
    const void *k[ATOM_CHUNK / VL];
    const void *v[ATOM_CHUNK];
    int64_t k_stride, v_len;
    int bf16;
} chunk_view;

static void widen_chunk(const atom_attention *at, const int32_t *table, int64_t kvh, int64_t c0, int64_t keys,
                        const void *kc, const void *vc, const buffers *w, chunk_view *view) {
    int64_t bs = at->block_size, g = at->num_kv_heads, hd = at->head_dim, vd = padded(hd);
    const int bf16 = at->dtype == ATOM_BF16;
    for (int64_t j0 = 0; j0 < keys;) {
        int64_t pos = c0 + j0, block = table[pos / bs], off = pos % bs, n = MIN(bs - off, keys - j0);
        int64_t ki = (block * g + kvh) * hd * bs + off, vi = ((block * g + kvh) * bs + off) * vd;
        if (bf16) {
            const uint16_t *k = (const uint16_t *)kc + ki, *v = (const uint16_t *)vc + vi;
            for (int64_t d = 0; d < hd; d++)
                for (int64_t j = 0; j < n; j++) w->kt[d * ATOM_CHUNK + j0 + j] = bf16_to_f32(k[d * bs + j]);
            for (int64_t i = 0; i < n * vd; i++) w->vt[j0 * vd + i] = bf16_to_f32(v[i]);
        } else {
            const float *k = (const float *)kc + ki;
            for (int64_t d = 0; d < hd; d++) memcpy(w->kt + d * ATOM_CHUNK + j0, k + d * bs, (size_t)n * 4);
            memcpy(w->vt + j0 * vd, (const float *)vc + vi, (size_t)(n * vd) * 4);
        }
        j0 += n;
    }
    for (int i = 0; i < ATOM_CHUNK / VL; i++) view->k[i] = w->kt + i * VL;
    view->v[0] = w->vt;
    view->k_stride = ATOM_CHUNK, view->v_len = ATOM_CHUNK, view->bf16 = 0;
}

static void view_chunk(const atom_attention *at, const int32_t *table, int64_t kvh, int64_t c0, int64_t keys,
                       const void *kc, const void *vc, chunk_view *view) {
    int64_t bs = at->block_size, g = at->num_kv_heads, hd = at->head_dim, vd = padded(hd);
    const int bf16 = at->dtype == ATOM_BF16;
    int64_t size = bf16 ? 2 : 4;
    for (int64_t j = 0; j < ATOM_CHUNK; j += VL) { /* groups beyond the last key read the last group again */
        int64_t pos = c0 + MIN(j, (keys - 1) / VL * VL);
        view->k[j / VL] = (const char *)kc + ((table[pos / bs] * g + kvh) * hd * bs + pos % bs) * size;
    }
    int64_t len = MIN(bs, ATOM_CHUNK);
    for (int64_t j = 0; j < keys; j += len) {
        int64_t pos = c0 + j;
        view->v[j / len] = (const char *)vc + ((table[pos / bs] * g + kvh) * bs + pos % bs) * vd * size;
    }
    view->k_stride = bs, view->v_len = len, view->bf16 = bf16;
}

INLINE void prefetch(const void *start, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch((const char *)start + i, 0, 2);
}

/* The pieces of a chunk lie scattered, so no hardware prefetcher runs ahead of them: values are fetched during the
 * scores, the next chunk's keys during the weighted sum. */
static void prefetch_values(const atom_attention *at, const chunk_view *view, int64_t keys) {
    int64_t row = padded(at->head_dim) * (view->bf16 ? 2 : 4);
    for (int64_t j = 0; j < keys; j += view->v_len)
        prefetch(view->v[j / view->v_len], MIN(view->v_len, keys - j) * row);
}

static void prefetch_keys(const atom_attention *at, const int32_t *table, int64_t kvh, int64_t first, int64_t last,
                          const void *kc) {
    int64_t bs = at->block_size, size = at->head_dim * bs * (at->dtype == ATOM_BF16 ? 2 : 4);
    if (bs > ATOM_CHUNK) return; /* one block then is several chunks, and its rows are no contiguous piece */
    for (int64_t pos = first; pos < MIN(first + ATOM_CHUNK, last); pos += bs)
        prefetch((const char *)kc + (table[pos / bs] * at->num_kv_heads + kvh) * size, size);
}

/* Rows [row0, row0 + rows) of a tile: row r is token first + r / group, head kvh * group + r % group. */
static void attend_rows(const atom_attention *at, const atom_batch *b, const atom_tile *tile, int64_t kvh, int64_t row0,
                        int64_t rows, const float *q, int64_t ldq, const void *kc, const void *vc, float *out,
                        int64_t ldo, const buffers *w) {
    int64_t group = at->num_heads / at->num_kv_heads, hd = at->head_dim, vd = padded(hd);
    const int32_t *table = b->block_tables + tile->seq * b->max_blocks;
    int64_t limit[MAX(ATOM_TILE_ROWS, ATOM_MAX_GROUP)], last = 0;
    for (int64_t r = 0; r < rows; r++) {
        int64_t t = tile->first + (row0 + r) / group, h = kvh * group + (row0 + r) % group;
        for (int64_t d = 0; d < hd; d++) w->q[r * vd + d] = q[t * ldq + h * hd + d] * at->scale;
        limit[r] = (int64_t)b->positions[t] + 1;
        last = MAX(last, limit[r]);
        w->m[r] = -INFINITY, w->l[r] = 0;
    }
    memset(w->o, 0, (size_t)(rows * vd) * sizeof(float));
    int direct = at->block_size % VL == 0 && rows <= QR;
    for (int64_t c0 = 0; c0 < last; c0 += ATOM_CHUNK) {
        int64_t keys = MIN(ATOM_CHUNK, last - c0);
        chunk_view view;
        if (direct) view_chunk(at, table, kvh, c0, keys, kc, vc, &view);
        else widen_chunk(at, table, kvh, c0, keys, kc, vc, w, &view);
        for (int64_t r = 0; r < rows; r += QR) {
            int n = (int)MIN(QR, rows - r);
            if (direct) prefetch_values(at, &view, keys);
            for (int64_t j = 0; j < keys; j += VECTORS(n) * VL)
                (view.bf16 ? score_bf16 : score_f32)(n, w->q + r * vd, vd, view.k + j / VL, view.k_stride, hd,
                                                     w->s + r * ATOM_CHUNK + j);
            if (direct && c0 + ATOM_CHUNK < last) prefetch_keys(at, table, kvh, c0 + ATOM_CHUNK, last, kc);
            for (int i = 0; i < n; i++)
                w->alpha[r + i] = softmax_step(w->s + (r + i) * ATOM_CHUNK, MIN(limit[r + i] - c0, ATOM_CHUNK),
                                               &w->m[r + i], &w->l[r + i]);
            for (int64_t d = 0; d < vd; d += VECTORS(n) * VL)
                (view.bf16 ? value_bf16 : value_f32)(n, w->s + r * ATOM_CHUNK, w->alpha + r, view.v, view.v_len, keys,
                                                     d, vd, w->o + r * vd, vd);
        }
    }
    for (int64_t r = 0; r < rows; r++) {
        int64_t t = tile->first + (row0 + r) / group, h = kvh * group + (row0 + r) % group;
        float inv = 1.0f / w->l[r];
        for (int64_t d = 0; d < hd; d++) out[t * ldo + h * hd + d] = w->o[r * vd + d] * inv;
    }
}

void atom_attend_tiles(atom_pool *pool, int tid, const atom_attention *at, const atom_batch *b, const atom_tile *tiles,
                       int64_t num_tiles, const float *q, int64_t ldq, const void *k_cache, const void *v_cache,
                       float *out, int64_t ldo, float *scratch) {
    buffers w;
    carve(at, scratch, &w);
    int64_t group = at->num_heads / at->num_kv_heads, g = at->num_kv_heads;
    /* Too few (tile, kv head) pairs to occupy the threads: share out single query heads, the same arithmetic. */
    int64_t parts = num_tiles * g < 4 * atom_pool_size(pool) && num_tiles == b->num_seqs ? group : 1;
    FOR_EACH_ITEM(pool, tid, item, num_tiles * g * parts) {
        const atom_tile *tile = &tiles[item / parts / g];
        int64_t rows = tile->count * group, part = item % parts;
        if (parts > 1 && tile->count == 1)
            attend_rows(at, b, tile, item / parts % g, part, 1, q, ldq, k_cache, v_cache, out, ldo, &w);
        else if (part == 0)
            attend_rows(at, b, tile, item / parts % g, 0, rows, q, ldq, k_cache, v_cache, out, ldo, &w);
    }
}

typedef struct {
    atom_pool *pool;
    const atom_attention *at;
    const atom_batch *b;
    const float *q, *k, *v;
    void *k_cache, *v_cache;
    float *out, *scratch;
    atom_tile *tiles;
    int64_t num_tiles;
} attention_task;

static void run_attention(void *arg, int tid) {
    attention_task *t = arg;
    const atom_attention *at = t->at;
    int64_t qd = at->num_heads * at->head_dim, kd = at->num_kv_heads * at->head_dim;
    FOR_EACH_ITEM(t->pool, tid, i, t->b->num_tokens)
        atom_store_kv(at, t->b->slots[i], t->k + i * kd, t->v + i * kd, t->k_cache, t->v_cache);
    atom_barrier(t->pool);
    atom_attend_tiles(t->pool, tid, at, t->b, t->tiles, t->num_tiles, t->q, qd, t->k_cache, t->v_cache, t->out, qd,
                      t->scratch + tid * atom_attention_scratch(at));
}

/* Attention alone, for models that run in torch: q [t, h, hd], k and v [t, g, hd] float32 and contiguous.
 * Returns 0, or -1 when memory is short. */
int atom_attend(atom_pool *pool, const atom_attention *at, const atom_batch *b, const float *q, const float *k,
                const float *v, void *k_cache, void *v_cache, float *out, float *scratch) {
    atom_tile *tiles = malloc((size_t)b->num_tokens * sizeof *tiles);
    if (!tiles) return -1;
    attention_task t = {pool, at, b, q, k, v, k_cache, v_cache, out, scratch, tiles, atom_make_tiles(at, b, tiles)};
    atom_pool_run(pool, run_attention, &t);
    free(tiles);
    return 0;
}
