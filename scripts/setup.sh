#!/usr/bin/env bash
# setup.sh [test|bench]: what a build needs, and with an argument what the tests or benchmarks need too.
# Quick when nothing has changed: it then only compares stamps and starts no pip.
set -euo pipefail
source "$(dirname "$0")/lib.sh"
kind="${1:-build}"
case "$kind" in
  build | test | bench) ;;
  *) die "setup.sh knows 'test' and 'bench', not '$kind'." ;;
esac

find_python() {
  local candidate
  for candidate in ${PYTHON:-} python3 python3.13 python3.12 python3.11; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  return 1
}

# The extension module needs Python.h of the interpreter that the venv is made from.
python_is_complete() {
  "$1" - 2>/dev/null <<'PY'
import ensurepip, os, sysconfig, venv
assert os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))
PY
}

# pip_install <stamp> <requirements file>: only when the file's content is not what the stamp says.
pip_install() {
  local stamp="$stamps/$1" wanted
  wanted="$(cat requirements.txt "$2" | sha256sum)"
  if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing the packages of $2 into .venv (minutes, the first time)"
    "$venv/bin/python" -m pip install --disable-pip-version-check -qq -r "$2" ||
      die "pip could not install $2 into .venv: check the network and try again."
    echo "$wanted" >"$stamp"
  fi
}

compiles '#include <version>' '#if __cplusplus < 202002L' '#error' '#endif' ||
  system_packages "the C++ build" g++ make
compiles '#include <xxhash.h>' || system_packages "the C++ build" libxxhash-dev

# The stamps' folder says that .venv was made to the end; an interrupted one is made again over what is there.
if ! [ -d "$stamps" ] && ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
  python="$(find_python)" || {
    system_packages "the Python package" python3 python3-venv python3-dev
    python="$(find_python)" || die "Python 3.11 or newer is needed: install it and run again with PYTHON=<its path>."
  }
  python_is_complete "$python" || {
    system_packages "the Python package" python3-venv python3-dev
    python_is_complete "$python" ||
      die "$python lacks the venv module or Python.h: install them, or run again with PYTHON=<another Python>."
  }
  say "creating .venv with $("$python" --version)"
  "$python" -m venv "$venv"
fi
mkdir -p "$stamps"
pip_install build requirements.txt

# Makes `import retrograd` in .venv find the package that the release build stages.
pth="$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/retrograd-dev.pth"
[ "$(cat "$pth" 2>/dev/null)" = "$root/build/release/python" ] || echo "$root/build/release/python" >"$pth"

case "$kind" in
  build) ;;
  test)
    pip_install test requirements-test.txt
    compiles '#include <gmock/gmock.h>' '#include <gtest/gtest.h>' ||
      system_packages "'make test'" libgtest-dev libgmock-dev
    ;;
  bench)
    compiles '#include <benchmark/benchmark.h>' || system_packages "'make bench'" libbenchmark-dev
    ;;
esac
