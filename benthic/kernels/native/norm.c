/* Root-mean-square norm and rotary positions. Source: model specification, sections 2.3 and 2.4. */
#include "parallel.h"
#include "rows.h"

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

/* x [rows, heads, dh] at strides ldx, hdx -> y packed; pairs a multiple of 8, at most 128 */
void benthic_rotate(const void *x, void *y, const int64_t *positions, const float *freqs, int64_t rows, int64_t heads,
                    int64_t dh, int64_t pairs, int64_t ldx, int64_t hdx, int32_t inverse, int32_t wide,
                    int32_t threads) {
    int n = team(threads, rows * heads * dh, 1 << 18);
    PARALLEL(n)
    for (int64_t t = 0; t < rows; t++) {
        Turn turn;
        turn_of(&turn, positions[t], freqs, pairs, inverse);
        for (int64_t h = 0; h < heads; h++) {
            int64_t from = t * ldx + h * hdx, to = (t * heads + h) * dh;
            if (wide) rotate_row(x, y, from, to, dh, pairs, &turn, 1);
            else rotate_row(x, y, from, to, dh, pairs, &turn, 0);
        }
    }
}
