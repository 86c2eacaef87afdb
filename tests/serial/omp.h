// Stands in for OpenMP where a build goes without it (fuzz targets, thread sanitizer): every parallel region is its one
// thread.
#ifndef MOK_TESTS_SERIAL_OMP_H
#define MOK_TESTS_SERIAL_OMP_H

static inline int omp_get_max_threads(void) { return 1; }
static inline int omp_get_num_procs(void) { return 1; }
static inline void omp_set_num_threads(int threads) { (void)threads; }

#endif
