# `make demo` and `make test` set everything up by themselves, in .venv and build/. `make help` lists the rest.
.DEFAULT_GOAL := help
.PHONY: help setup build demo test test-cpp test-python soak bench tsan asan fuzz format lint clean
.NOTPARALLEL:
PY := .venv/bin/python
SECONDS := 60

help:  ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 14

setup:  ## .venv with the pinned packages
	@scripts/setup.sh

build: setup  ## the C++ library and the Python module
	@scripts/build.sh release retrograd _C

demo: build  ## two training jobs, stock engine and retrograd side by side (DEMO_ARGS="--steps 50")
	@$(PY) -m retrograd.demo $(DEMO_ARGS)

test: test-cpp lint-quick test-python  ## all tests and checks

test-cpp: test-setup  ## GoogleTest, and the C++ program in tests/consumer
	@scripts/build.sh release
	@.venv/bin/ctest --preset release -j2
	@scripts/consumer.sh

test-python: test-setup  ## pytest (PYTEST_ARGS="-k hooks")
	@scripts/build.sh release retrograd _C python_test_libraries
	@$(PY) -m pytest $(PYTEST_ARGS)

# One allocator and one heap, so that malloc() knows of all that is allocated, and little lies free in between.
soak: test-setup  ## random programs on all backends for a long time (MINUTES=10 THREADS=8 SOAK_ARGS="--compile")
	@scripts/build.sh release retrograd _C
	@PYTHONMALLOC=malloc MALLOC_ARENA_MAX=1 $(PY) tests/python/soak.py --minutes $(or $(MINUTES),10) --threads $(or $(THREADS),8) $(SOAK_ARGS)

bench: setup  ## every benchmark, both sides (BENCH_ARGS="--benchmark_filter=hit")
	@scripts/setup.sh bench
	@scripts/build.sh release retrograd _C benchmarks
	@scripts/bench.sh $(BENCH_ARGS)

tsan: test-setup  ## the C++ tests under ThreadSanitizer
	@scripts/sanitize.sh tsan

asan: test-setup  ## the C++ tests under AddressSanitizer, LeakSanitizer and UndefinedBehaviorSanitizer
	@scripts/sanitize.sh asan

fuzz: setup  ## libFuzzer over what needs no torch, each program for SECONDS=60
	@scripts/fuzz.sh $(SECONDS)

format: test-setup  ## clang-format and ruff, in place
	@scripts/format.sh

lint: test-setup  ## ruff, format checks, lock check, clang-tidy
	@scripts/build.sh release
	@scripts/lint.sh

clean:  ## remove build/ (not .venv)
	rm -rf build

.PHONY: test-setup lint-quick
test-setup:
	@scripts/setup.sh test

lint-quick: test-setup
	@scripts/format.sh --check
	@scripts/thread_safety.sh
