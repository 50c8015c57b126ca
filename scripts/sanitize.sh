#!/usr/bin/env bash
# sanitize.sh tsan|asan: builds the C++ tests with the preset's sanitizers and runs them, each program as a whole (a
# process for every test would start libtorch hundreds of times). With tsan, tests of threads run once more with delays,
# and from Python.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
preset="$1"
case "$preset" in
  tsan)
    # libtorch, oneTBB and the C++ runtime are built without ThreadSanitizer: what their functions do to memory through
    # intercepted calls cannot be judged, as it does not see how they synchronize.
    export TSAN_OPTIONS="ignore_noninstrumented_modules=1 suppressions=$root/tests/sanitizers/tsan.supp ${TSAN_OPTIONS:-}"
    ;;
  asan)
    # libtorch's containers are not annotated.
    export ASAN_OPTIONS="detect_container_overflow=0 ${ASAN_OPTIONS:-}"
    export UBSAN_OPTIONS="print_stacktrace=1 ${UBSAN_OPTIONS:-}"
    ;;
  *) die "sanitize.sh knows 'tsan' and 'asan', not '$preset'." ;;
esac
targets=(cache_test engine_test fused_test replays)
[ "$preset" = asan ] || targets+=(_C)
scripts/build.sh "$preset" "${targets[@]}"
bin="build/$preset/tests"
failed=()
run() {
  say "$*"
  "$@" >"build/$preset/last.log" 2>&1 || {
    cat "build/$preset/last.log" >&2
    failed+=("$*")
  }
  grep -E '^\[  PASSED|inputs from| passed' "build/$preset/last.log" || true
}
run "$bin/cache_test"
# Not the forks: the sanitizers' own allocators leave a child with locks that the parent's threads held (seen with gdb).
run "$bin/engine_test" --gtest_filter='-Fork.*'
run "$bin/fused_test"
for corpus in tests/fuzz/corpus/*; do
  run "$bin/replay_${corpus##*/fuzz_}" "$corpus"
done
if [ "$preset" = tsan ]; then
  for seed in 1 2 3; do
    export RETROGRAD_PERTURB="$seed"
    say "with delays, seed $seed"
    run "$bin/cache_test" --gtest_filter='*Threads.*'
    run "$bin/engine_test" --gtest_filter='Threads.*:Retained.*'
    run "$bin/fused_test" --gtest_filter='*Thread*:GroupEntry.*'
  done
  unset RETROGRAD_PERTURB
  # Python is built without ThreadSanitizer, so its runtime has to be there first.
  runtime="$("${CXX:-c++}" -print-file-name=libtsan.so)"
  for file in threads perturbed; do
    run env LD_PRELOAD="$runtime" PYTHONPATH="$root/build/$preset/python" "$venv/bin/python" -m pytest -q -p no:cacheprovider --capture=sys \
      "tests/python/test_$file.py"
  done
fi
for command in "${failed[@]}"; do say "FAILED: $command"; done
exit $((${#failed[@]} > 0))
