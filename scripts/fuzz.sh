#!/usr/bin/env bash
# fuzz.sh <seconds> [program...]: builds tests/fuzz with clang and runs each program for so long, beginning with the
# committed inputs. What is found on the way stays in build/fuzz/corpus, an input that fails in build/fuzz/failed.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
seconds="$1"
shift
has_libfuzzer() {
  command -v clang++ >/dev/null &&
    echo 'extern "C" int LLVMFuzzerTestOneInput(const unsigned char*, unsigned long) { return 0; }' |
    clang++ -fsanitize=fuzzer,address -x c++ - -o /dev/null 2>/dev/null
}
has_libfuzzer || system_packages "'make fuzz'" clang libclang-rt-dev
has_libfuzzer || die "clang++ cannot link with -fsanitize=fuzzer: its compiler-rt is missing."
scripts/build.sh fuzz fuzzers
[ $# -gt 0 ] || set -- $(basename -s .cpp tests/fuzz/fuzz_*.cpp)
for name in "$@"; do
  say "$name for $seconds seconds"
  found="build/fuzz/corpus/$name"
  mkdir -p "$found" build/fuzz/failed
  build/fuzz/tests/"$name" -max_total_time="$seconds" -timeout=60 -print_final_stats=1 \
    -artifact_prefix="build/fuzz/failed/$name-" "$found" "tests/fuzz/corpus/$name" >"build/fuzz/$name.log" 2>&1 || {
    tail -n 40 "build/fuzz/$name.log" >&2
    die "$name failed: its input is in build/fuzz/failed."
  }
  sed -n 's/^stat::\(number_of_executed_units\|new_units_added\): */  \1 /p' "build/fuzz/$name.log"
done
