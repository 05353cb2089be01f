/* N-gram memory: table rows of recent ids, and the gate. Source: model specification, section 2.9. */
#include "parallel.h"
#include "simd.h"

void benthic_ngram_rows(const int64_t *ids, const int64_t *multipliers, const int64_t *primes, const int64_t *offsets,
                        int64_t *out, int64_t rows, int64_t n, int64_t heads) {
    for (int64_t t = 0; t < rows; t++) {
        int64_t mixed = ids[t * n] * multipliers[0];
        for (int64_t size = 1; size < n; size++) {
            mixed ^= ids[t * n + size] * multipliers[size];
            for (int64_t h = 0; h < heads; h++) {
                int64_t at = (size - 1) * heads + h;
                out[t * (n - 1) * heads + at] = mixed % primes[at] + offsets[at];
            }
        }
    }
}

INLINE void gate_row(const void *s, const void *key, const void *value, const float *weight, void *y, int64_t d,
                     int64_t at, int64_t key_at, int64_t value_at, float eps, int wide) {
    vf dot = zeros(), ss = zeros(), kk = zeros();
    for (int64_t j = 0; j < d; j += LANES) {
        vf a = load_any(s, at + j, wide), b = load_any(key, key_at + j, wide);
        dot = fma_f(a * load_f(weight + j), b, dot);
        ss = fma_f(a, a, ss);
        kk = fma_f(b, b, kk);
    }
    float x = sum_lanes(dot) / sqrtf(sum_lanes(ss) / (float)d + eps) / sqrtf(sum_lanes(kk) / (float)d + eps);
    x *= 1.0f / sqrtf((float)d);
    float m = fabsf(x) < 1e-6f ? 1e-6f : fabsf(x);
    vf g = sigmoid_v(splat(copysignf(sqrtf(m), x)));
    for (int64_t j = 0; j < d; j += LANES)
        store_any(y, at + j, load_any(s, at + j, wide) + g * load_any(value, value_at + j, wide), wide);
}

/* s, y [T, S, D] packed; keys [T, S, D] with rows at stride ldk, value [T, D] at ldv; images NULL or [T] bool */
void benthic_engram_gate(const void *s, const void *keys, const void *value, const float *weight, const uint8_t *images,
                         void *y, int64_t rows, int64_t streams, int64_t d, int64_t ldk, int64_t ldv, float eps,
                         int32_t wide, int32_t threads) {
    int n = team(threads, rows * streams * d, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++)
        for (int64_t i = 0; i < streams; i++) {
            int64_t at = (t * streams + i) * d, size = wide ? 4 : 2;
            if (images && images[t]) memcpy((char *)y + at * size, (const char *)s + at * size, (size_t)(d * size));
            else if (wide) gate_row(s, keys, value, weight + i * d, y, d, at, t * ldk + i * d, t * ldv, eps, 1);
            else gate_row(s, keys, value, weight + i * d, y, d, at, t * ldk + i * d, t * ldv, eps, 0);
        }
}
