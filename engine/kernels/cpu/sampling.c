/* Sampling over rows of float32 logits [n, v] without temporaries of that size. Rows are shared between threads. */
#include "atom.h"

#include <math.h>

typedef struct {
    atom_pool *pool;
    const float *logits;
    int64_t n, vocab;
    const float *inv_temperature;
    const double *uniform;
    int64_t *out;
} rows_task;

float atom_row_max(const float *x, int64_t n) {
    float top = -INFINITY;
    int64_t i = 0;
    if (n >= 4 * VL) {
        vf a = load_f32(x), b = load_f32(x + VL), c = load_f32(x + 2 * VL), d = load_f32(x + 3 * VL);
        for (i = 4 * VL; i + 4 * VL <= n; i += 4 * VL) {
            a = vmax(a, load_f32(x + i)), b = vmax(b, load_f32(x + i + VL));
            c = vmax(c, load_f32(x + i + 2 * VL)), d = vmax(d, load_f32(x + i + 3 * VL));
        }
        top = hmax(vmax(vmax(a, b), vmax(c, d)));
    }
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    return top;
}

static void run_argmax(void *arg, int tid) {
    rows_task *t = arg;
    FOR_EACH_ITEM(t->pool, tid, row, t->n) {
        const float *x = t->logits + row * t->vocab;
        float top = atom_row_max(x, t->vocab);
        int64_t i = 0;
        while (i < t->vocab && x[i] != top) i++;
        t->out[row] = i < t->vocab ? i : 0;
    }
}

/* Index of the largest logit of each row; ties go to the lowest index. */
void atom_argmax(atom_pool *pool, const float *logits, int64_t n, int64_t vocab, int64_t *out) {
    rows_task t = {.pool = pool, .logits = logits, .n = n, .vocab = vocab, .out = out};
    atom_pool_run(pool, run_argmax, &t);
}

#define SPAN 1024

/* Weights exp((x - top) * inv_t) of SPAN logits; the tail of a row is padded with zero weight. */
static float span_weights(const float *x, int64_t n, float top, float inv_t, float *weights) {
    vf sum = splat(0);
    int64_t i = 0;
    for (; i + VL <= n; i += VL) {
        vf e = vexp((load_f32(x + i) - splat(top)) * splat(inv_t));
        store_f32(weights + i, e);
        sum += e;
    }
    float total = hsum(sum);
    for (; i < n; i++) {
        weights[i] = vexp(splat((x[i] - top) * inv_t))[0];
        total += weights[i];
    }
    return total;
}

static int64_t sample_row(const float *x, int64_t n, float inv_t, double u) {
    float weights[SPAN], top = atom_row_max(x, n);
    double total = 0, below = 0;
    for (int64_t i = 0; i < n; i += SPAN) total += span_weights(x + i, MIN(SPAN, n - i), top, inv_t, weights);
    double target = u * total;
    int64_t last = 0;
    for (int64_t i = 0; i < n; i += SPAN) {
        int64_t len = MIN(SPAN, n - i);
        double span = span_weights(x + i, len, top, inv_t, weights);
        if (below + span <= target && i + SPAN < n) {
            below += span;
            continue;
        }
        double c = below;
        for (int64_t j = 0; j < len; j++) {
            if (weights[j] > 0) last = i + j;
            c += weights[j];
            if (c > target) return i + j;
        }
        below += span; /* rounding inside the span: go on with the next one */
    }
    return last;
}

static void run_sample(void *arg, int tid) {
    rows_task *t = arg;
    FOR_EACH_ITEM(t->pool, tid, row, t->n)
        t->out[row] = sample_row(t->logits + row * t->vocab, t->vocab, t->inv_temperature[row], t->uniform[row]);
}

/* Draw from softmax(logits * inv_temperature) by inverting the cumulative distribution at uniform[row] in [0, 1). */
void atom_sample(atom_pool *pool, const float *logits, int64_t n, int64_t vocab, const float *inv_temperature,
                 const double *uniform, int64_t *out) {
    rows_task t = {pool, logits, n, vocab, inv_temperature, uniform, out};
    atom_pool_run(pool, run_sample, &t);
}
