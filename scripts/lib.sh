# Sourced by the other scripts: where things are, and how to get what is missing.
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
venv="$root/.venv"
stamps="$venv/stamps"
cd "$root"

say() { printf 'retrograd: %s\n' "$*" >&2; }
die() {
  say "$*"
  exit 1
}

# system_packages <what for> <Debian package>...: installs them as root on Debian, else says what to run.
system_packages() {
  local purpose="$1"
  shift
  if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
    say "installing $* ($purpose)"
    # Package lists may be absent or stale, which shows only when an install fails.
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null 2>&1 && return
    apt-get update -qq >/dev/null || die "cannot install $*: apt-get update failed; check the network and try again."
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null ||
      die "cannot install $*; install them by hand and try again."
  elif command -v apt-get >/dev/null; then
    die "$purpose needs the packages $*: run 'sudo apt-get update && sudo apt-get install $*' and try again."
  else
    die "$purpose needs what Debian calls $*: install them with this system's package manager and try again."
  fi
}

# compiles <C++ line>...: whether a program of these lines compiles.
compiles() { printf '%s\n' "$@" 'int main() {}' | "${CXX:-c++}" -std=c++20 -fsyntax-only -x c++ - 2>/dev/null; }
