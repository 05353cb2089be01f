/* Temporaries of a step are a few megabytes each and come again in every layer. By default the C library hands such
 * blocks back to the system at once, and the next layer pays for fresh zeroed pages: a tenth of the prefill time. */
#if defined(__GLIBC__) || defined(__linux__)
#include <malloc.h>
#endif

void benthic_keep_memory(void) {
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 32 << 20); /* blocks below this come from the heap */
    mallopt(M_TRIM_THRESHOLD, 256 << 20); /* free heap that is kept */
#endif
}
