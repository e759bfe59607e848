#!/bin/sh
# The kernels' tests under AddressSanitizer and UndefinedBehaviorSanitizer, or another set:
#     tests/run_sanitized.sh [address,undefined | thread] [more arguments of pytest]
# Builds into a temporary folder; needs cmake, nanobind and GCC's or Clang's sanitizer libraries.
set -eu
root=$(cd "$(dirname "$0")/.." && pwd)
kinds=${1:-address,undefined}
[ $# -gt 0 ] && shift
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cp -r "$root/moebatch" "$work/moebatch"
rm -f "$work"/moebatch/native/_kernels*
cmake -S "$root" -B "$work/build" -DMOEBATCH_SANITIZE="$kinds" \
    -DMOEBATCH_OUTPUT="$work/moebatch/native" > "$work/log" || { cat "$work/log"; exit 1; }
cmake --build "$work/build" -j 2 > "$work/log" 2>&1 || { cat "$work/log"; exit 1; }
# The interpreter is not built with the sanitizers: their library must come first.
case $kinds in
    *thread*) library=libtsan.so ;;
    *) library=libasan.so ;;
esac
preload="$(${CXX:-c++} -print-file-name=$library) $(${CXX:-c++} -print-file-name=libstdc++.so.6)"
cd "$work"
# Python itself never frees everything it allocates; an editable install must not win over the copy.
LD_PRELOAD="$preload" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
PYTHONPATH="$work" OMP_NUM_THREADS=1 python -c '
import sys
sys.meta_path = [f for f in sys.meta_path if "Scikit" not in type(f).__name__]
import moebatch.native.kernels as kernels
module = kernels.extension()
assert module is not None and module.__file__.startswith(sys.argv[1]), module
print("testing", module.__file__)
import pytest
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[2:]]))
' "$work" -c "$root/pyproject.toml" --rootdir "$root" \
    "$root/tests/test_native.py" "$root/tests/test_native_rounded.py" "$root/tests/test_native_attention.py" "$@"
