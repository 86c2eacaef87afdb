# mok.c: bare `make` lists the targets.

ifeq ($(origin CC),default)
CC = gcc
endif
# The machine this is built on; MARCH=x86-64-v3 or similar builds for others.
MARCH  ?= native
OPT    ?= -O3

# No fast-math: errno and exception flags, which nobody reads, are all that is given up. Contraction is off so that C
# expressions mean the same everywhere; the one file that needs fused multiply-adds (the matrix product's inner loop)
# asks for them below.
WARN    = -Wall -Wextra -Wshadow
FLOAT   = -ffp-contract=off -fno-math-errno -fno-trapping-math
OPENMP  = -fopenmp
CFLAGS  = -std=c17 -D_GNU_SOURCE $(OPT) -g -march=$(MARCH) $(OPENMP) $(WARN) $(FLOAT) $(EXTRA_CFLAGS) -I. $(MPI_CFLAGS)
LDLIBS  = -Wl,--as-needed $(MPI_LIBS) -lcjson -lpcre2-8 -lm -lpthread

# data/tokenize.c is a program of its own.
COMMON  = $(filter-out data/tokenize.c,$(wildcard kernels/*.c data/*.c model/*.c))
LIBRARY = $(COMMON) $(wildcard kernels/cpu/*.c)
CUDA_LIBRARY = $(COMMON) $(wildcard kernels/cuda/*.c) $(wildcard kernels/cuda/*.cu)
TESTS   = $(patsubst tests/%.c,%,$(wildcard tests/test_*.c))
# Tests and checks that need the double build of the library.
DOUBLE_TESTS = test_gradients
# Tests that ranks run together: RANKS:NAME, once for each number of ranks.
RANKED_TESTS = $(addsuffix :test_comm,1 2 3 4 6) $(addsuffix :test_parallel,1 3 4 6) $(addsuffix :test_moe,1 2 3 4 6) \
               $(addsuffix :test_trainer_ranks,1 2 3 4 6) $(addsuffix :test_checkpoint_ranks,1 6) $(addsuffix :test_trace,1 3) \
               $(addsuffix :test_recompute,1 2 3 4)
# Tests that make test-full runs under the thread sanitizer.
TSAN_TESTS = test_mok test_moe_soak

# The GPU build. CUDA_ARCH=100a compiles for Blackwell.
NVCC       = $(CUDA_PLACE)/bin/nvcc
CUDA_ARCH ?= 90a
NCCL_FLAGS = $(if $(NCCL_HOME),-I$(NCCL_HOME)/include)
CUDA_CFLAGS = $(CFLAGS) -DMOK_CUDA -isystem $(CUDA_PLACE)/include $(NCCL_FLAGS)
NVCCFLAGS   = -std=c++17 -O3 -lineinfo -gencode arch=compute_$(CUDA_ARCH),code=sm_$(CUDA_ARCH) -DMOK_CUDA -I. $(NCCL_FLAGS) \
              -Xcompiler -Wall,-Wextra -Werror all-warnings $(EXTRA_NVCCFLAGS)
CUDA_LDLIBS = -L$(CUDA_PLACE)/lib64 $(if $(NCCL_HOME),-L$(NCCL_HOME)/lib) $(LDLIBS) -lcublasLt -lnccl -lcudart -lstdc++ -ldl

CPU    = build/cpu
DOUBLE = build/double
CUDA   = build/cuda
# The CPU build with BF16 results (tests/rounding.c): it stands in for the GPU when the tests of the GPU are tested.
ROUNDED = $(CPU)/rounded

.DEFAULT_GOAL := help
.PHONY: help setup train cuda tokenize run run-tiny test test-programs test-full test-sanitized thread-sanitized \
        test-gpu test-gpu-sanitized toolkit fuzz fuzz-targets bench sweep bench-cpu bench-kernels bench-attention \
        compare tune detect format clean

# ---- this machine: MPI_CFLAGS, MPI_LIBS and MPIRUN by scripts/mpi.sh; CUDA_PLACE, CUDA_BUILDS and CUDA_GPUS by cuda.sh ----

# Included before the targets, since what ./train is made of depends on them.

ifneq ($(filter-out help setup detect run test fuzz test-full format clean,$(or $(MAKECMDGOALS),help)),)
include build/mpi.mk build/cuda.mk
endif
build/cuda.mk: scripts/cuda.sh scripts/probe.sh build/cuda.asked
	@mkdir -p $(@D)
	@CC="$(CC)" sh scripts/cuda.sh > $@
# Looked at again when there are other GPUs or another toolkit.
build/cuda.asked: ASKED = $(CUDA_HOME) $(NCCL_HOME) $(realpath $(shell command -v nvcc 2>/dev/null)) $(shell nvidia-smi -L 2>/dev/null | wc -l)
build/cuda.asked: force
	@mkdir -p $(@D)
	@echo '$(ASKED)' | cmp -s - $@ || echo '$(ASKED)' > $@
build/mpi.mk: scripts/mpi.sh scripts/probe.sh build/mpi.asked
	@CC="$(CC)" sh scripts/mpi.sh > $@.new || { rm -f $@.new; exit 2; }
	@mv $@.new $@
# The choice is made again when other ones are asked for by MPI_HOME or PATH.
build/mpi.asked: ASKED = $(MPI_HOME) $(realpath $(shell command -v mpicc 2>/dev/null))
build/mpi.asked: force
	@mkdir -p $(@D)
	@echo '$(ASKED)' | cmp -s - $@ || echo '$(ASKED)' > $@

help:
	@echo "mok.c targets:"
	@echo "  make run        install what is missing, build, train the tiny preset on built-in stories by RANKS=2 ranks"
	@echo "                  (1 where there is one GPU), sample from it"
	@echo "  make test       install what is missing, build and run the tests (no GPU needed)"
	@echo "  make train      build ./train, that for GPUs where there is one, and ./tokenize"
	@echo "  make cuda       build the programs for GPUs without running them, CUDA_ARCH=90a (Hopper) or 100a (Blackwell)"
	@echo "  make tokenize   build ./tokenize, which makes token shards and multiple-choice files"
	@echo "  make test-full  the tests again under the address and undefined-behaviour sanitizers, those with"
	@echo "                  threads of their own under the thread sanitizer, and make fuzz"
	@echo "  make test-gpu   the GPU build against the CPU build: every operation, the model, whole runs; needs a GPU,"
	@echo "                  and up to eight for what ranks do"
	@echo "  make test-gpu-sanitized"
	@echo "                  a small part of it under compute-sanitizer: memcheck, racecheck, initcheck"
	@echo "  make fuzz       every parser against hostile input, FUZZ_SECONDS=10 each"
	@echo "  make compare    train one model with the megakernel and with all-to-all layers by turns: tokens/s, parts of a step,"
	@echo "                  losses, a picture; COMPARE_FLAGS='--preset qwen3-moe-mini ...', see scripts/compare.sh"
	@echo "  make bench      both passes of the MoE layer alone on the GPUs of this machine, by turns with torch and NCCL, if"
	@echo "                  python3 has torch; BENCH_FLAGS='--shape dsv3 --load burst', see build/cuda/tests/bench_layer --help"
	@echo "  make sweep      the megakernel with other settings beside the default ones, by turns: workers that only move rows,"
	@echo "                  minibatch, ring; SWEEP_FLAGS='--shape dsv3 --workload W2', see scripts/sweep.py --help"
	@echo "  make bench-cpu  GFLOP/s of every CPU operation beside the peak of the cores"
	@echo "  make bench-kernels"
	@echo "                  every GPU operation beside the ceiling of this GPU"
	@echo "  make bench-attention"
	@echo "                  attention's two passes, in bursts and under a load that lasts"
	@echo "  make tune       measure cuBLASLt's algorithms for TUNE_FLAGS='--preset moonlight-mini' on this GPU; training"
	@echo "                  uses the table from then on (tune/GPU.txt, or MOK_TUNE=FILE)"
	@echo "  make detect     say which compiler and libraries were found"
	@echo "  make setup      install what is missing"
	@echo "  make format     clang-format over the sources"
	@echo "  make clean      remove what was built"

setup:
	@CC="$(CC)" sh scripts/setup.sh

detect:
	@CC="$(CC)" MARCH="$(MARCH)" sh scripts/detect.sh

# The best build for this machine: that for GPUs where there is one.
train: $(if $(CUDA_GPUS),$(CUDA),$(CPU))/train tokenize
	@cp -f $< train
tokenize: $(CPU)/tokenize
	@cp -f $(CPU)/tokenize tokenize

RUN   ?= runs/tiny
RANKS ?= $(if $(filter 1,$(CUDA_GPUS)),1,2)
run: setup
	@$(MAKE) --no-print-directory run-tiny
run-tiny: train
	$(MPIRUN) -n $(RANKS) ./train --preset tiny --out "$(RUN)" --overwrite $(RUN_FLAGS)

# ---- objects: build/cpu (float) and build/double (the same sources with a double real) ----

# What the objects were built with; they follow when it changes.
FLAGS = $(CC) $(CFLAGS)
build/fuzz/flags: FLAGS = $(FUZZ_CC) $(FUZZ_CFLAGS)
$(CPU)/flags $(DOUBLE)/flags $(CUDA)/flags build/fuzz/flags: force
	@mkdir -p $(@D)
	@echo '$(FLAGS)' | cmp -s - $@ || echo '$(FLAGS)' > $@
.PHONY: force

$(CPU)/%.o: %.c Makefile $(CPU)/flags
	@mkdir -p $(@D)
	@echo "  CC  $@"
	@$(CC) $(CFLAGS) -MMD -MP -c $< -o $@

$(DOUBLE)/%.o: %.c Makefile $(DOUBLE)/flags
	@mkdir -p $(@D)
	@echo "  CC  $@"
	@$(CC) $(CFLAGS) -DMOK_DOUBLE -MMD -MP -c $< -o $@

$(CUDA)/flags: FLAGS = $(CC) $(CUDA_CFLAGS) $(NVCC) $(NVCCFLAGS)
$(CUDA)/flags: | toolkit
toolkit:
	@[ "$(CUDA_BUILDS)" ] || { echo "make: found no CUDA toolkit with cuBLASLt and NCCL, wanted one; see make detect" >&2; exit 2; }
$(CUDA)/%.o: %.c Makefile $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  CC  $@"
	@$(CC) $(CUDA_CFLAGS) -MMD -MP -c $< -o $@
# Their registers are counted: a spill, and products that ptxas does not let run beside other work (its notes C75xx, which
# are no warnings), would only show in their speed.
# (mok_*_recorded.cu, which run in one step with --trace, may spill.)
$(addprefix $(CUDA)/kernels/cuda/,attention_wgmma_%.cu.o grouped.cu.o router.cu.o mok_forward.cu.o mok_backward.cu.o): \
    NVCCFLAGS += -Xptxas -warn-spills
$(CUDA)/%.cu.o: %.cu Makefile $(CUDA)/flags
	@mkdir -p $(@D)
	@echo "  NVCC  $@"
	@$(NVCC) $(NVCCFLAGS) -ccbin $(CC) -MMD -MP -c $< -o $@ 2>$@.said || { cat $@.said >&2; exit 1; }
	@cat $@.said >&2
	@if grep -q 'C75[0-9][0-9]' $@.said; then rm $@; echo "make: $<: found tensor core products serialized" >&2; exit 1; fi
$(CUDA)/libmok.a: $(patsubst %.cu,$(CUDA)/%.cu.o,$(patsubst %.c,$(CUDA)/%.o,$(CUDA_LIBRARY)))
	@rm -f $@
	@ar rcs $@ $^
$(CUDA)/train: $(CUDA)/train.o $(CUDA)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ $(CUDA_LDLIBS)
$(CUDA)/tests/%: $(CUDA)/tests/%.o $(CUDA)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ -lcmocka $(CUDA_LDLIBS)
$(CUDA)/tests/%: $(CUDA)/tests/%.cu.o $(CUDA)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ $(CUDA_LDLIBS)
# These need kernels of their own.
$(CUDA)/tests/gpu_symm: $(CUDA)/tests/gpu_symm_kernels.cu.o
$(CUDA)/tests/bench_layer: $(CUDA)/tests/bench_unfused.cu.o

# Every output element goes through the one multiply-add of this file's inner loop, so contraction cannot make two
# blocks of one product differ.
$(CPU)/kernels/cpu/gemm.o $(DOUBLE)/kernels/cpu/gemm.o: FLOAT = -ffp-contract=fast -fno-math-errno -fno-trapping-math

$(CPU)/libmok.a: $(LIBRARY:%.c=$(CPU)/%.o)
	@rm -f $@
	@ar rcs $@ $^
$(DOUBLE)/libmok.a: $(LIBRARY:%.c=$(DOUBLE)/%.o)
	@rm -f $@
	@ar rcs $@ $^

$(CPU)/train: $(CPU)/train.o $(CPU)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS)

$(CPU)/tokenize: $(CPU)/data/tokenize.o $(CPU)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ $(LDLIBS)

$(CPU)/tests/%: $(CPU)/tests/%.o $(CPU)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ -lcmocka $(LDLIBS)
$(DOUBLE)/tests/%: $(DOUBLE)/tests/%.o $(DOUBLE)/libmok.a
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $^ -o $@ -lcmocka $(LDLIBS)

$(ROUNDED)/%: $(CPU)/%.o $(CPU)/tests/rounding.o $(CPU)/libmok.a
	@mkdir -p $(@D)
	@echo "  LD  $@"
	@$(CC) $(CFLAGS) $(ROUNDED_CALLS) $^ -o $@ $(LDLIBS)

TEST_PROGRAMS = $(foreach t,$(TESTS),$(if $(filter $(t),$(DOUBLE_TESTS)),$(DOUBLE),$(CPU))/tests/$(t))
# As tests/run.sh takes them: PROGRAM, or RANKS:PROGRAM.
RANKED_RUNS = $(subst :test_,:$(CPU)/tests/test_,$(RANKED_TESTS))
TEST_RUNS   = $(filter-out $(foreach r,$(RANKED_RUNS),$(lastword $(subst :, ,$(r)))),$(TEST_PROGRAMS)) $(RANKED_RUNS)

# The GPU build against the CPU build: one source, one program in each, which tests/test_gpu*.sh run.
GPU_PROGRAMS     = gpu_operations gpu_model gpu_mok
# What ranks do on a GPU each, which tests/test_gpu_ranks.sh runs.
RANK_PROGRAMS    = gpu_ranks gpu_ranks_training
ROUNDED_CALLS    = $(shell sed -n -e 's/^WRAP.\([a-z_]*\),.*/-Wl,--wrap=\1/p' \
                       -e 's/^WRAP_VALUE.[a-z]*, \([a-z_]*\),.*/-Wl,--wrap=\1/p' tests/rounding.c)
HARNESS_PROGRAMS = $(GPU_PROGRAMS:%=$(CPU)/tests/%) $(addprefix $(DOUBLE)/tests/,gpu_operations gpu_mok) \
                   $(GPU_PROGRAMS:%=$(ROUNDED)/tests/%) $(ROUNDED)/train \
                   $(RANK_PROGRAMS:%=$(CPU)/tests/%) $(RANK_PROGRAMS:%=$(ROUNDED)/tests/%)
GPU_TESTED       = $(CPU)/train $(CUDA)/train $(addprefix $(CUDA)/tests/,gpu_symm gpu_lost_wait gpu_mok_graph) \
                   $(GPU_PROGRAMS:%=$(CPU)/tests/%) $(GPU_PROGRAMS:%=$(CUDA)/tests/%) $(DOUBLE)/tests/gpu_mok \
                   $(RANK_PROGRAMS:%=$(CUDA)/tests/%)
$(RANK_PROGRAMS:%=$(ROUNDED)/tests/%): LDLIBS += -lcmocka

cuda: $(CUDA)/train $(addprefix $(CUDA)/tests/,$(GPU_PROGRAMS) $(RANK_PROGRAMS) gpu_symm gpu_lost_wait gpu_mok_graph \
          bench_kernels bench_attention bench_layer tune)

test: setup
	@$(MAKE) --no-print-directory test-programs
test-programs: $(CPU)/train $(CPU)/tokenize $(TEST_PROGRAMS) $(HARNESS_PROGRAMS)
	@COMPILE="$(CC) $(CFLAGS) -DMOK_DOUBLE" LIBS="-lcmocka $(LDLIBS)" DOUBLE=$(DOUBLE) MPIRUN="$(MPIRUN)" \
	    MOK_CPU=$(CPU) MOK_GPU=$(ROUNDED) MOK_GPUS=0 sh tests/run.sh $(TEST_RUNS) tests/test_mistakes.sh \
	    tests/test_detect.sh tests/test_launch.sh tests/test_launch_scripts.sh tests/test_plan_header.sh tests/test_compare.sh \
	    tests/test_gpu_harness.sh tests/test_gpu_ranks.sh tests/test_gpu.sh tests/test_gpu_layouts.sh

test-gpu: $(GPU_TESTED)
	@MOK_CPU=$(CPU) MOK_GPU=$(CUDA) DOUBLE=$(DOUBLE) MPIRUN="$(MPIRUN)" TEST_SECONDS=$${TEST_SECONDS:-1200} \
	    sh tests/run.sh tests/test_gpu_operations.sh tests/test_gpu_model.sh tests/test_gpu_mok.sh \
	    tests/test_gpu_ranks.sh tests/test_gpu.sh tests/test_gpu_layouts.sh
test-gpu-sanitized: $(GPU_TESTED)
	@MOK_CPU=$(CPU) MOK_GPU=$(CUDA) CUDA_HOME=$(CUDA_PLACE) sh tests/run.sh tests/test_gpu_sanitized.sh

# OpenMP's pragmas mean nothing, and tests/serial/omp.h stands in for its header.
SERIAL = -Wno-unknown-pragmas -Itests/serial

# One program per parser (tests/fuzz/fuzz_NAME.c), built by clang without OpenMP. tests/fuzz/fail.c stands in for
# kernels/fail.c: where the program would end, the target goes on.
FUZZ_CC      ?= clang
FUZZ_CFLAGS   = -std=c17 -D_GNU_SOURCE -O1 -g -march=$(MARCH) $(WARN) $(SERIAL) -I. $(MPI_CFLAGS) \
                -fsanitize=fuzzer,address,undefined,float-cast-overflow -fno-sanitize-recover=all \
                -fno-omit-frame-pointer
FUZZ_LIBRARY  = $(filter-out kernels/fail.c,$(LIBRARY)) tests/fuzz/fail.c
FUZZ_TARGETS  = $(patsubst tests/fuzz/%.c,build/fuzz/%,$(wildcard tests/fuzz/fuzz_*.c))

fuzz:
	@CC="$(CC)" FUZZ_CC="$(FUZZ_CC)" sh scripts/setup.sh --fuzz
	@$(MAKE) --no-print-directory fuzz-targets
	@sh tests/fuzz.sh
fuzz-targets: $(FUZZ_TARGETS)

build/fuzz/%.o: %.c Makefile build/fuzz/flags
	@mkdir -p $(@D)
	@echo "  CC  $@"
	@$(FUZZ_CC) $(FUZZ_CFLAGS) -MMD -MP -c $< -o $@
build/fuzz/libmok.a: $(FUZZ_LIBRARY:%.c=build/fuzz/%.o)
	@rm -f $@
	@ar rcs $@ $^
build/fuzz/fuzz_%: build/fuzz/tests/fuzz/fuzz_%.o build/fuzz/libmok.a
	@echo "  LD  $@"
	@$(FUZZ_CC) $(FUZZ_CFLAGS) $^ -o $@ $(LDLIBS)

# The same programs once more, built with the address and undefined-behaviour sanitizers. What they do not free at the
# end of the process is not looked for. Then TSAN_TESTS with the thread sanitizer, which does not understand OpenMP, and
# the fuzz targets. Some kernels spread addresses wider than sanitizers can follow; setarch -R, where allowed, stops it.
# UCX, which may be below MPI, patches madvise, and threads that end under the thread sanitizer then crash.
SANITIZE     = -fsanitize=address,undefined -fno-sanitize-recover=all -fno-omit-frame-pointer
FIXED_LAYOUT = $(shell setarch -R true 2>/dev/null && echo setarch -R)
test-full:
	@CC="$(CC)" FUZZ_CC="$(FUZZ_CC)" sh scripts/setup.sh --fuzz
	@$(MAKE) --no-print-directory CPU=build/tsan OPENMP="$(SERIAL)" OPT=-O2 \
	    EXTRA_CFLAGS="-fsanitize=thread" thread-sanitized
	@$(MAKE) --no-print-directory CPU=build/sanitize DOUBLE=build/sanitize-double OPT=-O2 \
	    EXTRA_CFLAGS="$(SANITIZE)" test-sanitized
thread-sanitized: $(TSAN_TESTS:%=$(CPU)/tests/%)
test-sanitized: $(CPU)/train $(CPU)/tokenize $(TEST_PROGRAMS) $(FUZZ_TARGETS)
	@MOK_LONG=1 MOK_TRAIN=$(CPU)/train MOK_TOKENIZE=$(CPU)/tokenize ASAN_OPTIONS=detect_leaks=0 \
	    UCX_MEM_MMAP_HOOK_MODE=none MPIRUN="$(MPIRUN)" $(FIXED_LAYOUT) \
	    sh tests/run.sh $(TEST_RUNS) $(TSAN_TESTS:%=build/tsan/tests/%) tests/fuzz.sh

BENCH_RANKS ?= $(or $(CUDA_GPUS),1)
# Fewer passes than the program times by itself. Of a flag that stands twice the last one counts.
BENCH_SHORT = --backward --iterations 60
bench: $(CUDA)/tests/bench_layer
	@if python3 -c 'import torch' 2>/dev/null; then \
	    MPIRUN="$(MPIRUN)" python3 scripts/bench_layer.py --beside $< --ranks $(BENCH_RANKS) \
	        $(BENCH_SHORT) $(BENCH_FLAGS); \
	else \
	    echo "make bench: python3 has no torch: the layer by torch and NCCL is left out"; \
	    $(if $(filter-out 1,$(BENCH_RANKS)),$(MPIRUN) -n $(BENCH_RANKS)) $< $(BENCH_SHORT) $(BENCH_FLAGS); \
	fi

sweep: $(CUDA)/tests/bench_layer
	@MPIRUN="$(MPIRUN)" python3 scripts/sweep.py $< --ranks $(BENCH_RANKS) $(SWEEP_FLAGS)

bench-cpu: $(CPU)/tests/bench_cpu $(CPU)/tests/bench_moe
	@$(CPU)/tests/bench_cpu
	@$(CPU)/tests/bench_moe
	@$(MPIRUN) -n 2 $(CPU)/tests/bench_moe

bench-kernels: $(CUDA)/tests/bench_kernels
	@$(CUDA)/tests/bench_kernels

bench-attention: $(CUDA)/tests/bench_attention
	@$(CUDA)/tests/bench_attention

# Sized for the GPUs there are, with a vocabulary as large as models have, which the built-in stories do not fill.
COMPARE_PRESET = moonlight-mini$(if $(filter 1,$(RANKS)),-1)
COMPARE_FLAGS ?= $(if $(CUDA_GPUS),--preset $(COMPARE_PRESET) --vocab 129280 --route balanced,--preset tiny)
compare: train
	@MPIRUN="$(MPIRUN)" sh scripts/compare.sh $(COMPARE_FLAGS)

TUNE_FLAGS ?= --preset moonlight-mini
tune: $(CUDA)/tests/tune
	@$(CUDA)/tests/tune $(TUNE_FLAGS)

format:
	clang-format -i train.c */*.c */*.h */*/*.c */*/*.h */*.cu */*/*.cu */*/*.cuh

clean:
	rm -rf build train tokenize

.SECONDARY:
-include $(shell find build -name '*.d' 2>/dev/null)
