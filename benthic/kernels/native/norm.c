/* Root-mean-square norm and rotary positions. Source: model specification, sections 2.3 and 2.4. */
#include "parallel.h"
#include "simd.h"

INLINE void norm_row(const void *x, const float *weight, void *y, int64_t from, int64_t to, int64_t d, float eps,
                     int wide) {
    vf squares = zeros();
    for (int64_t j = 0; j < d; j += LANES) {
        vf v = load_any(x, from + j, wide);
        squares = fma_f(v, v, squares);
    }
    vf r = splat(1.0f / sqrtf(sum_lanes(squares) / (float)d + eps));
    for (int64_t j = 0; j < d; j += LANES)
        store_any(y, to + j, load_any(x, from + j, wide) * r * load_f(weight + j), wide);
}

/* x rows at stride ldx, y packed; d a multiple of 16 */
void benthic_rms_norm(const void *x, const float *weight, void *y, int64_t rows, int64_t d, int64_t ldx, float eps,
                      int32_t wide, int32_t threads) {
    int n = team(threads, rows * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        if (wide) norm_row(x, weight, y, t * ldx, t * d, d, eps, 1);
        else norm_row(x, weight, y, t * ldx, t * d, d, eps, 0);
    }
}

/* ---- rotation ---- */

typedef double vd __attribute__((vector_size(64)));
typedef float vf8 __attribute__((vector_size(32)));
typedef int64_t vl __attribute__((vector_size(64)));

/* sine and cosine of 16 angles of any size below 2^31: the angle is reduced in double precision */
INLINE void turn(vf angle, vf *sine, vf *cosine) {
    float lanes[LANES], rest[LANES];
    int32_t quarter[LANES];
    store_f(lanes, angle);
    for (int h = 0; h < LANES; h += 8) {
        vf8 a;
        memcpy(&a, lanes + h, sizeof a);
        vd x = __builtin_convertvector(a, vd);
        vd n = (x * 0.63661977236758134308 + 6755399441055744.0) - 6755399441055744.0;
        vd r = (x - n * 1.57079632679489655800) - n * 6.12323399573676603587e-17;
        vf8 f = __builtin_convertvector(r, vf8);
        memcpy(rest + h, &f, sizeof f);
        vl q = __builtin_convertvector(n, vl);
        for (int i = 0; i < 8; i++) quarter[h + i] = (int32_t)q[i];
    }
    vf r = load_f(rest);
    vi q;
    memcpy(&q, quarter, sizeof q);
    vf z = r * r;
    vf s = fma_f(splat(-1.9515295891e-4f), z, splat(8.3321608736e-3f));
    s = fma_f(s, z, splat(-1.6666654611e-1f));
    s = fma_f(s * z, r, r);
    vf c = fma_f(splat(2.443315711809948e-5f), z, splat(-1.388731625493765e-3f));
    c = fma_f(c, z, splat(4.166664568298827e-2f));
    c = fma_f(c * z, z, fma_f(splat(-0.5f), z, splat(1.0f)));
    vi odd = (q & 1) != 0;
    vf a = pick(odd, c, s), b = pick(odd, s, c);
    *sine = as_f(as_u(a) ^ ((vu)(q & 2) << 30));
    *cosine = as_f(as_u(b) ^ ((vu)((q + 1) & 2) << 30));
}

#define MOST_PAIRS 128

INLINE void rotate_row(const void *x, void *y, int64_t from, int64_t to, int64_t dh, int64_t pairs, const float *c,
                       const float *s, int wide) {
    int64_t plain = dh - 2 * pairs;
    int64_t size = wide ? 4 : 2;
    memcpy((char *)y + to * size, (const char *)x + from * size, (size_t)(plain * size));
    for (int64_t j = 0; j < 2 * pairs; j += LANES) {
        vf v = load_any(x, from + plain + j, wide);
        vf other = shuffle2(v, v, (vi){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
        store_any(y, to + plain + j, v * load_f(c + j) + other * load_f(s + j), wide);
    }
}

/* x [rows, heads, dh] at strides ldx, hdx -> y packed; pairs a multiple of 8, at most 128 */
void benthic_rotate(const void *x, void *y, const int64_t *positions, const float *freqs, int64_t rows, int64_t heads,
                    int64_t dh, int64_t pairs, int64_t ldx, int64_t hdx, int32_t inverse, int32_t wide,
                    int32_t threads) {
    int n = team(threads, rows * heads * dh, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        float c[2 * MOST_PAIRS], s[2 * MOST_PAIRS], one[LANES], two[LANES];
        for (int64_t j = 0; j < pairs; j += LANES) {
            float f[LANES];
            int64_t have = pairs - j < LANES ? pairs - j : LANES;
            for (int i = 0; i < LANES; i++) f[i] = i < have ? freqs[j + i] : 0.0f;
            vf sine, cosine;
            turn(splat((float)positions[t]) * load_f(f), &sine, &cosine);
            store_f(one, cosine);
            store_f(two, inverse ? -sine : sine);
            for (int64_t i = 0; i < have; i++) {
                c[2 * (j + i)] = c[2 * (j + i) + 1] = one[i];
                s[2 * (j + i)] = -two[i];
                s[2 * (j + i) + 1] = two[i];
            }
        }
        for (int64_t h = 0; h < heads; h++) {
            int64_t from = t * ldx + h * hdx, to = (t * heads + h) * dh;
            if (wide) rotate_row(x, y, from, to, dh, pairs, c, s, 1);
            else rotate_row(x, y, from, to, dh, pairs, c, s, 0);
        }
    }
}
