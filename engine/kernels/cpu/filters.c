/* Temperature, min_p, top_k and top_p over rows of logits, in place: what is filtered out becomes -inf.
 *
 * The definitions are those of `engine/executors/filters.py`: each filter keeps every logit at or above a threshold.
 * The thresholds are found by radix selection over the distance of a logit's bit pattern from the largest one's, among
 * the logits within a few units of it if they suffice, where sorting 49,152 logits would take milliseconds. */
#include "atom.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BINS 2048

typedef struct {
    float value, weight;
} candidate;

typedef struct {
    atom_pool *pool;
    float *logits;
    int64_t n, vocab;
    const float *inv_temperature, *min_p;
    const int64_t *top_k;
    const double *top_p;
    float *weights;  /* [threads, vocab] */
    candidate *list; /* [threads, vocab + 1] */
} filter_task;

/* Bit patterns in the order of the numbers they stand for; both zeros are one number. */
INLINE uint32_t order_of(float x) {
    union { float f; uint32_t u; } v = {.f = x + 0.0f};
    return v.u & 0x80000000u ? ~v.u : v.u | 0x80000000u;
}

INLINE float from_order(uint32_t o) {
    union { uint32_t u; float f; } v = {.u = o & 0x80000000u ? o & 0x7fffffffu : ~o};
    return v.f;
}

/* Weight (or number, if weights is null) of the logits at or above `cut`. */
static double weight_above(const float *x, const float *weights, int64_t n, float cut) {
    double total = 0;
    int64_t i = 0;
    while (i + VL <= n) {
        vf sum = splat(0);
        for (int64_t end = MIN(n - VL + 1, i + 1024); i < end; i += VL) {
            vu keep = (vu)(load_f32(x + i) >= splat(cut));
            sum += (vf)(keep & (vu)(weights ? load_f32(weights + i) : splat(1.0f)));
        }
        total += hsum(sum);
    }
    for (; i < n; i++) total += x[i] >= cut ? weights ? weights[i] : 1.0 : 0.0;
    return total;
}

/* A short list that holds every logit that can matter: those at or above a cut below which nothing is needed. */
static int64_t gather_candidates(const float *x, const float *weights, int64_t n, float top, float floor, double needed,
                                 candidate *out) {
    float cut = floor;
    for (float width = 2; width < 40; width *= 2) {
        if (!(top - width > floor)) break;
        if (weight_above(x, weights, n, top - width) >= needed * 1.0001) { /* the margin covers rounding of the sums */
            cut = top - width;
            break;
        }
    }
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++) {
        out[count] = (candidate){x[i], weights ? weights[i] : 1.0f};
        count += x[i] >= cut;
    }
    return count;
}

/* The largest logit at which the summed weight of all logits at or above it reaches `needed`, of those at or above
 * `floor`; -inf if none does. Null weights count 1 each. `list` has room for n + 1. */
static float select_threshold(const float *x, const float *weights, int64_t n, float top, float floor, double needed,
                              candidate *list) {
    static const int shifts[] = {21, 10, 0}, bits[] = {11, 11, 10};
    int64_t count = gather_candidates(x, weights, n, top, floor, needed, list);
    uint32_t base = order_of(top), prefix = 0;
    double below = 0;
    for (int level = 0; level < 3; level++) {
        double mass[BINS];
        memset(mass, 0, sizeof mass);
        int shift = shifts[level], bins = 1 << bits[level], bin = 0, last = -1;
        for (int64_t i = 0; i < count; i++) {
            uint32_t distance = base - order_of(list[i].value);
            if (level && distance >> (shift + bits[level]) != prefix) continue;
            mass[distance >> shift & (uint32_t)(bins - 1)] += list[i].weight;
        }
        for (; bin < bins; bin++) {
            if (mass[bin] > 0) last = bin;
            if (below + mass[bin] >= needed) break;
            below += mass[bin];
        }
        if (bin == bins) {
            if (level == 0 || last < 0) return -INFINITY;
            bin = last; /* enough when it was summed in another order: its last member is the one */
            below -= mass[bin];
        }
        prefix = level ? prefix << bits[level] | (uint32_t)bin : (uint32_t)bin;
    }
    return from_order(base - prefix);
}

static void filter_row(float *x, int64_t n, float inv_t, float min_p, int64_t top_k, double top_p, float *weights,
                       candidate *list) {
    float top = -INFINITY, threshold = -INFINITY;
    for (int64_t i = 0; i < n; i++) x[i] *= inv_t;
    top = atom_row_max(x, n);
    if (!(top > -INFINITY && top < INFINITY)) return;
    if (min_p > 0) threshold = top + logf(min_p);
    if (top_k > 0 && top_k < n) {
        float kth = select_threshold(x, NULL, n, top, -INFINITY, (double)top_k, list);
        threshold = kth > threshold ? kth : threshold;
    }
    if (top_p < 1) {
        double total;
        for (int64_t i = 0; i + VL <= n; i += VL) store_f32(weights + i, vexp(load_f32(x + i) - splat(top)));
        for (int64_t i = n / VL * VL; i < n; i++) weights[i] = vexp(splat(x[i] - top))[0];
        total = weight_above(x, weights, n, threshold);
        float nucleus = select_threshold(x, weights, n, top, threshold, top_p * total, list);
        threshold = nucleus > threshold ? nucleus : threshold;
    }
    for (int64_t i = 0; i < n; i++) x[i] = x[i] < threshold ? -INFINITY : x[i];
}

static void run_filter(void *arg, int tid) {
    filter_task *t = arg;
    FOR_EACH_ITEM(t->pool, tid, row, t->n)
        filter_row(t->logits + row * t->vocab, t->vocab, t->inv_temperature[row], t->min_p[row], t->top_k[row],
                   t->top_p[row], t->weights + tid * t->vocab, t->list + tid * (t->vocab + 1));
}

/* logits [n, vocab] are scaled and masked in place. Returns 0, or -1 when memory is short. */
int atom_filter(atom_pool *pool, float *logits, int64_t n, int64_t vocab, const float *inv_temperature,
                const float *min_p, const int64_t *top_k, const double *top_p) {
    size_t entries = (size_t)atom_pool_size(pool) * (size_t)(vocab + 1);
    float *weights = malloc(entries * sizeof *weights);
    candidate *list = malloc(entries * sizeof *list);
    if (weights && list) {
        filter_task t = {pool, logits, n, vocab, inv_temperature, min_p, top_k, top_p, weights, list};
        atom_pool_run(pool, run_filter, &t);
    }
    free(weights);
    free(list);
    return weights && list ? 0 : -1;
}
