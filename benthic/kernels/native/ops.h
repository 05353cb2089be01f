/* C functions that other files of the library call. */
#ifndef BENTHIC_OPS_H
#define BENTHIC_OPS_H

#include <stdint.h>

int32_t benthic_linear_f32(const void *x, int32_t x_wide, int64_t rows, int64_t k, int64_t n, int64_t ldx,
                           const float *w, void *out, int32_t wide_out, int32_t threads);

#endif
