#!/bin/sh
# Builds the native kernels with the address and the undefined behaviour sanitizer, and runs their tests on that build:
#   tools/sanitize.sh [PYTEST ARGUMENTS]
# The first report of a sanitizer ends the tests.
set -eu
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
include=$($python -c 'import jax.ffi; print(jax.ffi.include_dir())')

${CXX:-g++} -std=c++17 -O1 -g -fPIC -shared -fsanitize=address,undefined -fno-sanitize-recover=all -Wno-psabi \
  -isystem "$include" pallas_kernels/*/*.cc -o "$folder/kernels.so"

tests=tests/pallas_kernels
[ $# -gt 0 ] || set -- -k "native or company or do_not_fit or layer_that" $tests/test_native.py $tests/test_matmul.py $tests/test_kv_write.py \
  $tests/test_paged_attention.py $tests/test_sample_logits.py $tests/test_rms_norm.py $tests/test_gated_activation.py $tests/test_rope.py

# Python is not built for a sanitizer, so its runtime is loaded first; what Python never frees is no leak of ours.
LD_PRELOAD="$(${CXX:-g++} -print-file-name=libasan.so) $(${CXX:-g++} -print-file-name=libstdc++.so)" \
  ASAN_OPTIONS=detect_leaks=0 JAXSERVE_CPU_LIBRARY="$folder/kernels.so" JAX_PLATFORMS=cpu \
  $python -m pytest -q "$@"
