#!/usr/bin/env bash
# format.sh [--check]: formats C++ with clang-format and Python with ruff, or only checks.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
export PATH="$venv/bin:$PATH"
shopt -s globstar nullglob
cpp=({cache,engine,bindings,bench,tests}/**/*.{h,cpp})
if [ "${1:-}" = --check ]; then
  ruff check -q
  ruff format -q --check || die "Python files need formatting: run 'make format'."
  clang-format --dry-run -Werror "${cpp[@]}" || die "C++ files need formatting: run 'make format'."
else
  ruff check -q --fix-only
  ruff format -q
  clang-format -i "${cpp[@]}"
fi
