#!/usr/bin/env bash
# build.sh <preset> [target...]: configures when needed and builds.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
preset="$1"
shift
export PATH="$venv/bin:$PATH"
ninja_file="build/$preset/build.ninja"
cache="build/$preset/CMakeCache.txt"

configured_with="build/$preset/CMakePresets.json"  # the presets of that time

# Ninja itself configures again when a CMake file changes. It cannot know of other presets, newly installed packages
# or a system package that was missing last time.
if ! [ -e "$ninja_file" ] || ! cmp -s CMakePresets.json "$configured_with" || [ "$stamps/build" -nt "$ninja_file" ] ||
  grep -q -E '^(GTest|benchmark)_DIR:PATH=.*-NOTFOUND' "$cache"; then
  mkdir -p build
  cmake --preset "$preset" >"build/$preset-configure.log" 2>&1 || {
    cat "build/$preset-configure.log" >&2
    die "CMake could not configure the preset $preset: see the message above."
  }
  cp CMakePresets.json "$configured_with"
fi
cmake --build --preset "$preset" ${1:+--target "$@"}
