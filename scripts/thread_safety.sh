#!/usr/bin/env bash
# Checks the lock annotations in cache/ with clang's -Wthread-safety; without clang++ it says so and passes.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
if ! command -v clang++ >/dev/null; then
  say "skipping the lock check of cache/: no clang++ (apt-get install clang)."
  exit 0
fi
tbb="$(sed -n 's/^TBB_DIR:PATH=//p' build/release/CMakeCache.txt)/../../../include"
for source in cache/*.cpp; do
  clang++ -std=c++20 -fsyntax-only -Wall -Wextra -Wthread-safety -Werror -I. -isystem "$tbb" "$source"
done
