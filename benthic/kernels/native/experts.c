/* Router, routed experts and the activation between an expert's two matrices.
 * Source: model specification, section 2.12. T rows, k experts a row, E experts, D hidden width, I expert width. */
#include <stdlib.h>

#include "dots.h"
#include "ops.h"
#include "parallel.h"
#include "rows.h"

/* silu(min(gate, limit)) * clamp(up), limit <= 0: no clamp */
INLINE vf activate(vf gate, vf up, float limit) {
    if (limit > 0) {
        gate = at_most(gate, splat(limit));
        up = at_least(at_most(up, splat(limit)), splat(-limit));
    }
    return gate / (splat(1.0f) + exp_v(-gate)) * up;
}

/* gate and up rows at one stride; weights NULL: 1 */
void benthic_swiglu(const void *gate, const void *up, const float *weights, void *y, int64_t rows, int64_t width,
                    int64_t stride, float limit, int32_t wide, int32_t wide_out, int32_t threads) {
    int n = team(threads, rows * width, 1 << 17);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t j = 0; j < width; j += LANES) {
            vf v = activate(load_any(gate, t * stride + j, wide), load_any(up, t * stride + j, wide), limit);
            if (weights) v = v * splat(weights[t]);
            store_any(y, t * width + j, v, wide_out);
        }
}

/* the k best of one row by sqrt(softplus(score)) + bias; scores become sqrt(softplus(score)) */
INLINE void route_row(float *s, const float *b, int64_t *chosen, float *weights, int64_t experts, int64_t k,
                      int normalise, float scale) {
    for (int64_t e = 0; e < experts; e++) s[e] = sqrtf(s[e] > 20.0f ? s[e] : log1pf(expf(s[e])));
    for (int64_t i = 0; i < k; i++) { /* the next best: below the last one, or equal to it and behind it */
        float last = i ? s[chosen[i - 1]] + b[chosen[i - 1]] : INFINITY, best = -INFINITY;
        int64_t at = -1;
        for (int64_t e = 0; e < experts; e++) {
            float r = s[e] + b[e];
            int open = i == 0 || r < last || (r == last && e > chosen[i - 1]);
            if (open && (at < 0 || r > best)) best = r, at = e;
        }
        chosen[i] = at < 0 ? i : at; /* only where scores are NaN */
    }
    float sum = 0.0f;
    for (int64_t i = 0; i < k; i++) sum += s[chosen[i]];
    for (int64_t i = 0; i < k; i++) {
        float w = s[chosen[i]];
        if (normalise && k > 1) w = w / (sum + 1e-20f);
        weights[i] = w * scale;
    }
}

/* scores [T, E] f32 are overwritten; bias [E] (stride 0) or [T, E] */
void benthic_route(float *scores, const float *bias, int64_t bias_stride, int64_t *ids, float *weights, int64_t rows,
                   int64_t experts, int64_t k, int32_t normalise, float scale, int32_t threads) {
    int n = team(threads, rows, 128);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++)
        route_row(scores + t * experts, bias + t * bias_stride, ids + t * k, weights + t * k, experts, k, normalise,
                  scale);
}

#define PAIRS 64 /* (row, slot) pairs of one expert worked on together */

/* one expert, `count` pairs: gather, first matrices, activation, grid, second matrix. Pair i is of row (i - base) / k;
 * weights NULL: 1 */
static void some_pairs(const bf16 *x, const int64_t *pairs, int64_t count, int64_t k, int64_t base,
                       const float *weights, const bf16 *w13, const bf16 *w2, int64_t d, int64_t inner, float limit, int quantise,
                       int round_hidden, bf16 *parts, bf16 *room) {
    bf16 *in = room, *both = in + PAIRS * d, *hidden = both + PAIRS * 2 * inner, *out = hidden + PAIRS * inner;
    for (int64_t i = 0; i < count; i++) memcpy(in + i * d, x + (pairs[i] - base) / k * d, (size_t)d * 2);
    band_bf(in, d, count, w13, d, 0, 2 * inner, both, 2 * inner, 0);
    for (int64_t i = 0; i < count; i++) {
        vf w = splat(weights ? weights[pairs[i]] : 1.0f);
        for (int64_t j = 0; j < inner; j += 2 * LANES) {
            vf y[2];
            for (int h = 0; h < 2; h++) {
                int64_t at = i * 2 * inner + j + h * LANES;
                y[h] = activate(load_bf(both + at), load_bf(both + at + inner), limit) * w;
                if (round_hidden) y[h] = round_bf_v(y[h]);
            }
            if (quantise) {
                Power p = power_fp8(y[0], y[1]);
                for (int h = 0; h < 2; h++) y[h] = on_e4m3(y[h], p) * splat(p.scale);
            }
            for (int h = 0; h < 2; h++) store_bf(hidden + i * inner + j + h * LANES, y[h]);
        }
    }
    band_bf(hidden, inner, count, w2, inner, 0, d, out, d, 0);
    for (int64_t i = 0; i < count; i++) memcpy(parts + pairs[i] * d, out + i * d, (size_t)d * 2);
}

/* parts[i] for every (row, slot) pair i, and behind them, where there is a shared expert, one part a row.
 * Returns 0; 1 without memory; 2 for an id that is no expert. */
static int all_pairs(const bf16 *x, const int64_t *ids, const float *weights, const bf16 *w13, const bf16 *w2,
                     const bf16 *shared_w13, const bf16 *shared_w2, bf16 *parts, int64_t rows, int64_t k,
                     int64_t experts, int64_t d, int64_t inner, float limit, int quantise, int round_hidden,
                     int threads) {
    int64_t pairs = rows * k, alone = shared_w13 ? rows : 0;
    for (int64_t i = 0; i < pairs; i++)
        if (ids[i] < 0 || ids[i] >= experts) return 2;
    int n = team(threads, 3 * (pairs + alone) * inner * d, 1 << 22);
    size_t room = (size_t)(PAIRS * (2 * d + 3 * inner)) * sizeof(bf16);
    int64_t items = experts + pairs / PAIRS + alone / PAIRS + 2; /* most pieces of at most PAIRS pairs */
    int64_t *order = malloc((size_t)(pairs + alone + 3 * items + experts + 1) * sizeof *order);
    char *rooms = malloc(room * (size_t)n);
    if (!order || !rooms) {
        free(order), free(rooms);
        return 1;
    }
    int64_t *starts = order + pairs + alone, *first = starts + experts + 1, *count = first + items;
    int64_t *expert = count + items;
    memset(starts, 0, sizeof *starts * (size_t)(experts + 1));
    for (int64_t i = 0; i < pairs; i++) starts[ids[i] + 1]++;
    for (int64_t e = 0; e < experts; e++) starts[e + 1] += starts[e];
    for (int64_t i = 0; i < pairs; i++) order[starts[ids[i]]++] = i; /* starts[e] is now the end of e */
    for (int64_t t = 0; t < alone; t++) order[pairs + t] = pairs + t;
    starts[experts] = pairs + alone; /* the shared expert is the last one, and takes every row */
    int64_t pieces = 0;
    for (int64_t e = 0, from = 0; e <= experts; from = starts[e++])
        for (int64_t at = from; at < starts[e]; at += PAIRS) {
            first[pieces] = at;
            count[pieces] = starts[e] - at < PAIRS ? starts[e] - at : PAIRS;
            expert[pieces++] = e;
        }
    PARALLEL_UNEVEN(n)
    for (int64_t p = 0; p < pieces; p++) {
        bf16 *mine = (bf16 *)(rooms + room * (size_t)this_thread());
        int64_t e = expert[p];
        if (e == experts)
            some_pairs(x, order + first[p], count[p], 1, pairs, NULL, shared_w13, shared_w2, d, inner, limit, quantise,
                       round_hidden, parts, mine);
        else
            some_pairs(x, order + first[p], count[p], k, 0, weights, w13 + e * 2 * inner * d, w2 + e * inner * d, d,
                       inner, limit, quantise, round_hidden, parts, mine);
    }
    free(order), free(rooms);
    return 0;
}

/* y [T, D] f32. D and I multiples of 32. Returns as all_pairs. */
int32_t benthic_experts(const bf16 *x, const int64_t *ids, const float *weights, const bf16 *w13, const bf16 *w2,
                        float *y, int64_t rows, int64_t k, int64_t experts, int64_t d, int64_t inner, float limit,
                        int32_t quantise, int32_t round_hidden, int32_t threads) {
    bf16 *parts = malloc((size_t)(rows * k * d) * sizeof *parts);
    if (!parts) return 1;
    int code = all_pairs(x, ids, weights, w13, w2, NULL, NULL, parts, rows, k, experts, d, inner, limit, quantise,
                         round_hidden, threads);
    int n = team(threads, rows * k * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < (code ? 0 : rows); t++)
        for (int64_t j = 0; j < d; j += LANES) {
            vf sum = load_bf(parts + t * k * d + j);
            for (int64_t i = 1; i < k; i++) sum += load_bf(parts + (t * k + i) * d + j);
            store_f(y + t * d + j, sum);
        }
    free(parts);
    return code;
}

/* All of a mixture-of-experts sublayer: router, routed experts, shared expert, their sum.
 * h, y [T, D] bfloat16; gate [E, D] f32 (gate_wide) or bfloat16; bias [E] (stride 0) or [T, E]; shared_w13 [2*I, D], shared_w2 [D, I].
 * Returns 0, or 1 without memory. */
int32_t benthic_moe(const bf16 *h, int32_t gate_wide, const void *gate, const float *bias, int64_t bias_stride, const bf16 *w13,
                    const bf16 *w2, const bf16 *shared_w13, const bf16 *shared_w2, bf16 *y, int64_t rows, int64_t k,
                    int64_t experts, int64_t d, int64_t inner, int32_t normalise, float scale, float limit,
                    int32_t quantise, int32_t round_hidden, int32_t threads) {
    bf16 *parts = malloc((size_t)(rows * (k + 1) * d) * sizeof *parts);
    bf16 *x = malloc((size_t)(rows * d) * sizeof *x);
    float *scores = malloc((size_t)(rows * (experts + k)) * sizeof *scores);
    int64_t *ids = malloc((size_t)(rows * k) * sizeof *ids);
    if (!parts || !x || !scores || !ids) {
        free(parts), free(x), free(scores), free(ids);
        return 1;
    }
    float *weights = scores + rows * experts;
    int code = 0;
    if (gate_wide) code = benthic_linear_f32(h, 0, rows, d, experts, d, gate, scores, 1, threads);
    else benthic_linear_bf16(h, rows, 1, d, experts, d, 0, gate, scores, experts, 0, 1, threads);
    int n = team(threads, rows * (experts * 8 + d), 1 << 16);
    PARALLEL(n)
    for (int64_t t = 0; t < (code ? 0 : rows); t++) {
        route_row(scores + t * experts, bias + t * bias_stride, ids + t * k, weights + t * k, experts, k, normalise,
                  scale);
        if (quantise) grid_row(h + t * d, x + t * d, d);
        else memcpy(x + t * d, h + t * d, (size_t)d * 2);
    }
    if (!code)
        code = all_pairs(x, ids, weights, w13, w2, shared_w13, shared_w2, parts, rows, k, experts, d, inner, limit,
                         quantise, round_hidden, threads);
    n = team(threads, rows * k * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < (code ? 0 : rows); t++)
        for (int64_t j = 0; j < d; j += LANES) {
            vf sum = load_bf(parts + t * k * d + j);
            for (int64_t i = 1; i < k; i++) sum += load_bf(parts + (t * k + i) * d + j);
            store_bf(y + t * d + j, sum + load_bf(parts + (rows * k + t) * d + j));
        }
    free(parts), free(x), free(scores), free(ids);
    return code;
}
