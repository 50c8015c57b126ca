#!/usr/bin/env bash
# bench.sh [argument...]: runs the Google Benchmark programs with these arguments, then the programs of bench/python.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
for source in bench/bench_*.cpp; do
  name="$(basename "$source" .cpp)"
  say "$name"
  # fused.py, below, makes the plans for the fused ones and runs them.
  "build/release/bench/$name" --benchmark_filter=-fused "$@"
done
for program in bench/python/*.py; do
  # Files without a main part are helpers of the others.
  if [ -e "$program" ] && grep -q __main__ "$program"; then
    say "$(basename "$program" .py)"
    "$venv/bin/python" "$program"
  fi
done
