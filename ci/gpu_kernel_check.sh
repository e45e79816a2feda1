#!/usr/bin/env bash
# The kernel's tests on a GPU host, in several processes: most of the time is compilation.
#   ci/gpu_kernel_check.sh OUT_FOLDER [WORKERS]
set -uo pipefail
out=${1:?a folder for the results}
export PYTHONPATH="src${PYTHONPATH:+:$PYTHONPATH}"
python3 -m pytest -q -n "${2:-8}" -p no:cacheprovider --noconftest --timeout=240 --junitxml="$out/kernel-tests.xml" --durations=10 \
  tests/gpu/test_kernel_gpu_semantics.py tests/gpu/test_kernel_gpu.py tests/gpu/test_kernel_gpu_options.py
