#!/usr/bin/env bash
# One GPU in minutes, with what a plain torch + transformers machine has (Ray, Prefect and vLLM are not needed):
#   benchmarks/gpu_check.sh [--json]          PYTHON=/path/to/python names another interpreter
#   benchmarks/gpu_check.sh --cpu             exercise the script without a GPU
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3}
[ -x .venv/bin/python ] && [ "$PYTHON" = python3 ] && PYTHON=.venv/bin/python
export PYTHONPATH=$PWD TOKENIZERS_PARALLELISM=false
exec timeout 480 "$PYTHON" -m benchmarks.gpu_check "$@"
