/* One step of a Llama-family decoder in a single call: embedding, layers, final norm, logits of the wanted rows.
 *
 * An eager framework issues about 12 operators per layer, which at one row cost more than the arithmetic. Here every
 * thread walks through the whole step; phases are separated by barriers, and items inside a phase are taken from a
 * shared counter. Activations are float32 throughout. */
#include "atom.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    atom_pool *pool;
    const atom_model *m;
    const atom_batch *b;
    float *x, *h, *qkv, *attn, *act; /* [t, ...] */
    int64_t ld_qkv, ld_act;
    float *scratch;
    int64_t scratch_each;
    float *logits; /* [n, v] */
    float *hidden; /* [t, d] final-norm hidden states, or null */
    atom_tile *tiles;
    int64_t num_tiles;
} step;

static int64_t round_up(int64_t n, int64_t to) { return CEIL_DIV(n, to) * to; }

static int64_t qkv_width(const atom_attention *at) {
    return (at->num_heads + 2 * at->num_kv_heads) * at->head_dim;
}

static int64_t thread_scratch(const atom_model *m) {
    return round_up(MAX(ATOM_GEMM_SCRATCH + 2 * ATOM_MC * NR, atom_attention_scratch(&m->attention)), 32);
}

/* Floats of workspace for a step of so many tokens. */
int64_t atom_workspace(const atom_model *m, int64_t tokens, int num_threads) {
    int64_t heads = m->attention.num_heads * m->attention.head_dim;
    int64_t row = 2 * m->hidden + round_up(qkv_width(&m->attention), NR) + heads + round_up(m->ffn, NR);
    return tokens * row + num_threads * thread_scratch(m) + 64;
}

static void rms_norm(const float *x, const float *weight, int64_t n, float eps, float *out) {
    vf acc = splat(0);
    int64_t i = 0;
    float tail = 0;
    for (; i + VL <= n; i += VL) {
        vf v = load_f32(x + i);
        acc += v * v;
    }
    for (; i < n; i++) tail += x[i] * x[i];
    float scale = 1.0f / sqrtf((hsum(acc) + tail) / (float)n + eps);
    for (i = 0; i < n; i++) out[i] = x[i] * scale * weight[i];
}

static void embed_row(const atom_model *m, int64_t token, float *out) {
    int64_t d = m->hidden;
    if (m->embedding) {
        for (int64_t i = 0; i < d; i++)
            out[i] = m->dtype == ATOM_BF16 ? bf16_to_f32(((const uint16_t *)m->embedding)[token * d + i])
                                           : ((const float *)m->embedding)[token * d + i];
    } else if (m->dtype == ATOM_BF16) {
        const uint32_t *src = (const uint32_t *)m->lm_head.data + token / NR * NR * (d / 2) + token % NR;
        for (int64_t i = 0; i < d / 2; i++) {
            out[2 * i] = bf16_to_f32((uint16_t)src[i * NR]);
            out[2 * i + 1] = bf16_to_f32((uint16_t)(src[i * NR] >> 16));
        }
    } else {
        const float *src = (const float *)m->lm_head.data + token / NR * NR * d + token % NR;
        for (int64_t i = 0; i < d; i++) out[i] = src[i * NR];
    }
    if (m->embed_scale != 1.0f)
        for (int64_t i = 0; i < d; i++) out[i] *= m->embed_scale;
}

static void rotate(float *x, const float *cos, const float *sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

/* QK-norm, RoPE and the write into the cache for one token; q stays in its row of qkv. */
static void prepare_token(const step *s, const atom_layer *layer, int64_t t) {
    const atom_model *m = s->m;
    const atom_attention *at = &m->attention;
    int64_t hd = at->head_dim, half = m->rotary_dim / 2, heads = at->num_heads + at->num_kv_heads;
    float *row = s->qkv + t * s->ld_qkv;
    const float *cos = m->cos + s->b->positions[t] * half, *sin = m->sin + s->b->positions[t] * half;
    for (int64_t h = 0; h < heads; h++) {
        const float *norm = h < at->num_heads ? layer->q_norm : layer->k_norm;
        if (norm) rms_norm(row + h * hd, norm, hd, m->eps, row + h * hd);
        rotate(row + h * hd, cos, sin, half);
    }
    atom_store_kv(at, s->b->slots[t], row + at->num_heads * hd, row + heads * hd, layer->k_cache, layer->v_cache);
}

typedef enum { STORE, ADD } epilogue;

/* out = a W^T + bias (padded columns) or out += a W^T + bias. */
static void linear(const step *s, int tid, const atom_weight *w, const float *a, int64_t lda, int64_t m, float *out,
                   int64_t ldo, epilogue how) {
    int64_t panels = CEIL_DIV(w->n, NR), row_blocks = CEIL_DIV(m, ATOM_MC);
    float *scratch = s->scratch + tid * s->scratch_each, *tile = scratch + ATOM_GEMM_SCRATCH;
    FOR_EACH_ITEM(s->pool, tid, item, panels * row_blocks) {
        int64_t p = item % panels, r0 = item / panels * ATOM_MC, rows = MIN(ATOM_MC, m - r0);
        int64_t cols = MIN(NR, w->n - p * NR);
        float *dst = out + r0 * ldo + p * NR;
        if (how == STORE && (cols == NR || ldo >= panels * NR)) {
            atom_gemm_panel(w, (int)s->m->dtype, p, a + r0 * lda, lda, rows, dst, ldo, scratch);
            continue;
        }
        atom_gemm_panel(w, (int)s->m->dtype, p, a + r0 * lda, lda, rows, tile, NR, scratch);
        for (int64_t r = 0; r < rows; r++)
            for (int64_t j = 0; j < cols; j++)
                dst[r * ldo + j] = tile[r * NR + j] + (how == ADD ? dst[r * ldo + j] : 0);
    }
    atom_barrier(s->pool);
}

/* act = silu(a Wgate^T) * (a Wup^T) */
static void gate_up(const step *s, int tid, const atom_layer *layer, int64_t m) {
    int64_t panels = CEIL_DIV(layer->gate.n, NR), row_blocks = CEIL_DIV(m, ATOM_MC), d = s->m->hidden;
    float *scratch = s->scratch + tid * s->scratch_each, *gate = scratch + ATOM_GEMM_SCRATCH, *up = gate + ATOM_MC * NR;
    int dtype = (int)s->m->dtype;
    FOR_EACH_ITEM(s->pool, tid, item, panels * row_blocks) {
        int64_t p = item % panels, r0 = item / panels * ATOM_MC, rows = MIN(ATOM_MC, m - r0);
        atom_gemm_panel(&layer->gate, dtype, p, s->h + r0 * d, d, rows, gate, NR, scratch);
        atom_gemm_panel(&layer->up, dtype, p, s->h + r0 * d, d, rows, up, NR, scratch);
        float *dst = s->act + r0 * s->ld_act + p * NR;
        for (int64_t r = 0; r < rows; r++)
            for (int v = 0; v < NR; v += VL) {
                vf g = load_f32(gate + r * NR + v), u = load_f32(up + r * NR + v);
                store_f32(dst + r * s->ld_act + v, g / (splat(1.0f) + vexp(-g)) * u);
            }
    }
    atom_barrier(s->pool);
}

static void norm_rows(const step *s, int tid, const float *weight) {
    int64_t d = s->m->hidden;
    FOR_EACH_ITEM(s->pool, tid, t, s->b->num_tokens) rms_norm(s->x + t * d, weight, d, s->m->eps, s->h + t * d);
    atom_barrier(s->pool);
}

/* out = or += attention over norm(x), with its output projection. */
static void attention_half(const step *s, int tid, const atom_layer *layer, float *out, epilogue how) {
    const atom_attention *at = &s->m->attention;
    int64_t t = s->b->num_tokens, d = s->m->hidden, heads = at->num_heads * at->head_dim;
    norm_rows(s, tid, layer->input_norm);
    linear(s, tid, &layer->qkv, s->h, d, t, s->qkv, s->ld_qkv, STORE);
    FOR_EACH_ITEM(s->pool, tid, i, t) prepare_token(s, layer, i);
    atom_barrier(s->pool);
    atom_attend_tiles(s->pool, tid, at, s->b, s->tiles, s->num_tiles, s->qkv, s->ld_qkv, layer->k_cache, layer->v_cache,
                      s->attn, heads, s->scratch + tid * s->scratch_each);
    atom_barrier(s->pool);
    linear(s, tid, &layer->o, s->attn, heads, t, out, d, how);
}

/* out = or += the MLP of norm(x). */
static void mlp_half(const step *s, int tid, const atom_layer *layer, float *out, epilogue how) {
    int64_t t = s->b->num_tokens, d = s->m->hidden;
    norm_rows(s, tid, layer->post_norm);
    gate_up(s, tid, layer, t);
    linear(s, tid, &layer->down, s->act, s->ld_act, t, out, d, how);
}

static void run_layer(const step *s, int tid, const atom_layer *layer) {
    attention_half(s, tid, layer, s->x, ADD);
    mlp_half(s, tid, layer, s->x, ADD);
}

static void run_step(void *arg, int tid) {
    step *s = arg;
    const atom_model *m = s->m;
    int64_t d = m->hidden, n = s->b->num_logits;
    FOR_EACH_ITEM(s->pool, tid, t, s->b->num_tokens) embed_row(m, s->b->token_ids[t], s->x + t * d);
    atom_barrier(s->pool);
    for (int64_t i = 0; i < m->num_layers; i++) run_layer(s, tid, &m->layers[i]);
    if (s->hidden) { /* rows for prompt logprobs are few enough to be handed back and projected later in pieces */
        FOR_EACH_ITEM(s->pool, tid, t, s->b->num_tokens)
            rms_norm(s->x + t * d, m->final_norm, d, m->eps, s->hidden + t * d);
        atom_barrier(s->pool);
    }
    FOR_EACH_ITEM(s->pool, tid, i, n)
        rms_norm(s->x + s->b->logits_rows[i] * d, m->final_norm, d, m->eps, s->h + i * d);
    atom_barrier(s->pool);
    if (n) linear(s, tid, &m->lm_head, s->h, d, n, s->logits, m->vocab, STORE);
}

/* Parts of the workspace and tiles of a step; the caller frees the tiles. 0, or -1: memory is short. */
static int lay_out(step *s, atom_pool *pool, const atom_model *m, const atom_batch *b, float *workspace) {
    int64_t t = b->num_tokens, heads = m->attention.num_heads * m->attention.head_dim;
    atom_tile *tiles = malloc((size_t)MAX(t, 1) * sizeof *tiles);
    if (!tiles) return -1;
    s->pool = pool, s->m = m, s->b = b, s->tiles = tiles;
    s->num_tiles = atom_make_tiles(&m->attention, b, tiles);
    s->ld_qkv = round_up(qkv_width(&m->attention), NR);
    s->ld_act = round_up(m->ffn, NR);
    float *p = (float *)(((uintptr_t)workspace + 63) / 64 * 64);
    s->scratch_each = thread_scratch(m);
    s->scratch = p, p += atom_pool_size(pool) * s->scratch_each;
    s->x = p, p += t * m->hidden;
    s->h = p, p += t * m->hidden;
    s->qkv = p, p += t * s->ld_qkv;
    s->attn = p, p += t * heads;
    s->act = p;
    return 0;
}

/* logits [num_logits, vocab]; hidden [t, d] or null; workspace of atom_workspace floats. 0, or -1: memory is short. */
int atom_decoder_step(atom_pool *pool, const atom_model *m, const atom_batch *b, float *workspace, float *logits,
                      float *hidden) {
    step s = {.logits = logits, .hidden = hidden};
    if (lay_out(&s, pool, m, b, workspace)) return -1;
    atom_pool_run(pool, run_step, &s);
    free(s.tiles);
    return 0;
}

typedef struct {
    step s;
    const atom_layer *layers;
    int64_t count;
} layers_task;

static void run_layers(void *arg, int tid) {
    layers_task *l = arg;
    for (int64_t i = 0; i < l->count; i++) run_layer(&l->s, tid, &l->layers[i]);
}

/* A pipeline stage's layers over x [t, d], in place. 0, or -1: memory is short. */
int atom_layers(atom_pool *pool, const atom_model *m, const atom_batch *b, float *x, float *workspace) {
    layers_task l = {.layers = m->layers, .count = m->num_layers};
    if (lay_out(&l.s, pool, m, b, workspace)) return -1;
    l.s.x = x;
    atom_pool_run(pool, run_layers, &l);
    free(l.s.tiles);
    return 0;
}

typedef struct {
    step s;
    const atom_layer *layer;
    int64_t mlp;
    float *out;
} half_task;

static void run_half(void *arg, int tid) {
    half_task *h = arg;
    (h->mlp ? mlp_half : attention_half)(&h->s, tid, h->layer, h->out, STORE);
}

/* Half of one layer over x [t, d], which is not added: ranks that hold parts of its weights first add up what each of
 * them has in out [t, d]. 0, or -1: memory is short. */
int atom_half_layer(atom_pool *pool, const atom_model *m, const atom_batch *b, int64_t layer, int64_t mlp, float *x,
                    float *out, float *workspace) {
    half_task h = {.layer = m->layers + layer, .mlp = mlp, .out = out};
    if (lay_out(&h.s, pool, m, b, workspace)) return -1;
    h.s.x = x;
    atom_pool_run(pool, run_half, &h);
    free(h.s.tiles);
    return 0;
}

typedef struct {
    atom_pool *pool;
    const atom_model *m;
    const int32_t *ids;
    int64_t n;
    float *out;
} embed_task;

static void run_embed(void *arg, int tid) {
    embed_task *e = arg;
    int64_t d = e->m->hidden;
    FOR_EACH_ITEM(e->pool, tid, t, e->n) {
        if (e->ids[t] < 0) memset(e->out + t * d, 0, (size_t)d * sizeof *e->out);
        else embed_row(e->m, e->ids[t], e->out + t * d);
    }
    atom_barrier(e->pool);
}

/* Embeddings [n, d] of ids; zeros where an id is negative, which is a row that another rank holds. */
void atom_embed(atom_pool *pool, const atom_model *m, const int32_t *ids, int64_t n, float *out) {
    embed_task e = {pool, m, ids, n, out};
    atom_pool_run(pool, run_embed, &e);
}

typedef struct {
    step s;
    const float *rows;
    int64_t n;
} head_task;

static void run_head(void *arg, int tid) {
    head_task *h = arg;
    linear(&h->s, tid, &h->s.m->lm_head, h->rows, h->s.m->hidden, h->n, h->s.logits, h->s.m->vocab, STORE);
}

/* Logits of n final-norm hidden rows, for prompt log probabilities; workspace as for a step of 0 tokens. */
void atom_decoder_logits(atom_pool *pool, const atom_model *m, const float *rows, int64_t n, float *workspace,
                         float *logits) {
    head_task h = {.rows = rows, .n = n};
    h.s.pool = pool, h.s.m = m, h.s.logits = logits;
    h.s.scratch_each = thread_scratch(m);
    h.s.scratch = (float *)(((uintptr_t)workspace + 63) / 64 * 64);
    atom_pool_run(pool, run_head, &h);
}

int atom_abi(void) { return ATOM_ABI; }
const char *atom_isa(void) { return ATOM_ISA; }
