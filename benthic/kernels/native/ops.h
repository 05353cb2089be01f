/* C functions that other files of the library call. */
#ifndef BENTHIC_OPS_H
#define BENTHIC_OPS_H

#include <stdint.h>

int32_t benthic_linear_f32(const void *x, int32_t x_wide, int64_t rows, int64_t k, int64_t n, int64_t ldx,
                           const float *w, void *out, int32_t wide_out, int32_t threads);

void benthic_linear_bf16(const uint16_t *x, int64_t rows, int64_t groups, int64_t k, int64_t n, int64_t ldx, int64_t gdx,
                         const uint16_t *w, void *out, int64_t ldo, int64_t gdo, int32_t wide_out, int32_t threads);

#endif
