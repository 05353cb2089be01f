/* Rows over threads. The threads are those of torch's own OpenMP pool; how many is the caller's last argument. */
#ifndef BENTHIC_PARALLEL_H
#define BENTHIC_PARALLEL_H

#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
#endif

/* As many threads as give each at least `grain` units of work. Grains are about 50 microseconds: a shorter piece gains
 * little from a second core, and loses a scheduler's time slice whenever that core is busy with something else. */
static inline int team(int threads, int64_t units, int64_t grain) {
    int64_t most = units / grain;
    if (most < 1) most = 1;
    return most < threads ? (int)most : threads;
}

static inline int this_thread(void) {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

#define PRAGMA(x) _Pragma(#x)
#ifdef _OPENMP
/* guided: a thread that the system holds up leaves its share to the others */
#define PARALLEL(n) PRAGMA(omp parallel for num_threads(n) schedule(guided) if ((n) > 1))
#define PARALLEL_UNEVEN(n) PRAGMA(omp parallel for num_threads(n) schedule(dynamic, 1) if ((n) > 1))
#else
#define PARALLEL(n)
#define PARALLEL_UNEVEN(n)
#endif

#endif
