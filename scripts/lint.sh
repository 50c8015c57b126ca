#!/usr/bin/env bash
# ruff, the format checks, clang's lock check and clang-tidy.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
command -v clang-tidy >/dev/null || system_packages "'make lint'" clang clang-tidy
scripts/format.sh --check
scripts/thread_safety.sh
# GCC's precompiled headers mean nothing to clang; without them it reads the headers themselves.
mkdir -p build/lint
sed -E 's/-include [^ ]*cmake_pch\.hxx//g; s/-Winvalid-pch//g' build/release/compile_commands.json \
  >build/lint/compile_commands.json
clang-tidy -p build/lint --quiet cache/*.cpp engine/*.cpp
