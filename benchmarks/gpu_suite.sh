#!/usr/bin/env bash
# Everything that needs a GPU, in one call and without a network; benchmarks/README.md says more.
#   benchmarks/gpu_suite.sh                        results to $OUT, else benchmarks/results/<date>-<device>
#   benchmarks/gpu_suite.sh --rehearse             the same code with tiny sizes on a CPU, to test the suite itself
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${CRIUS_PYTHON:-}" ]; then
    CRIUS_PYTHON=python3
    [ -x .venv/bin/python ] && CRIUS_PYTHON=.venv/bin/python
fi
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
exec "$CRIUS_PYTHON" benchmarks/gpu_suite.py "$@"
