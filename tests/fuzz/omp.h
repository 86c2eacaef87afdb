// Stands in for OpenMP, which clang's fuzz builds go without: every parallel region is its one thread.
#ifndef MOK_TESTS_FUZZ_OMP_H
#define MOK_TESTS_FUZZ_OMP_H

static inline int omp_get_max_threads(void) { return 1; }

#endif
