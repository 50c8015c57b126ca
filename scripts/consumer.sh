#!/usr/bin/env bash
# Installs the release build's C++ part into a scratch prefix, builds tests/consumer against it and runs its programs.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
export PATH="$venv/bin:$PATH"
prefix="$root/build/release/prefix"
torch_prefix="$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')"
rm -rf "$prefix"
cmake --install build/release --prefix "$prefix" --component cpp >/dev/null
cmake -S tests/consumer -B build/consumer -G Ninja -DCMAKE_BUILD_TYPE=Release \
  "-DCMAKE_PREFIX_PATH=$prefix;$torch_prefix" >build/consumer-configure.log 2>&1 || {
  cat build/consumer-configure.log >&2
  die "find_package(retrograd) failed on the installed library: see the message above."
}
cmake --build build/consumer
for program in consumer stored_plans; do
  if ldd "build/consumer/$program" | grep -q -e libpython -e libtorch_python; then
    die "the C++ program $program of tests/consumer is linked with Python, which libretrograd must never need."
  fi
done
./build/consumer/consumer

# Plans that one Python process compiles are used by another one, and by a C++ program.
RETROGRAD_CACHE_DIR="$(mktemp -d)"
export RETROGRAD_CACHE_DIR
trap 'rm -rf "$RETROGRAD_CACHE_DIR"' EXIT
python tests/consumer/make_plans.py compile
python tests/consumer/make_plans.py use
./build/consumer/stored_plans
