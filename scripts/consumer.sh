#!/usr/bin/env bash
# Installs the release build's C++ part into a scratch prefix, builds tests/consumer against it and runs it.
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
if ldd build/consumer/consumer | grep -q -e libpython -e libtorch_python; then
  die "the C++ program tests/consumer is linked with Python, which libretrograd must never need."
fi
./build/consumer/consumer
