#!/bin/sh
# Everything that needs a GPU, under eight minutes: parity with the CPU, fused attention, torch.compile, the shipped pair,
# step time and memory at 130M and 760M. Writes reports/gpu.md; exits 1 if a check fails, 2 without a GPU.
# On a CPU: benchmarks/gpu.sh --device cpu --quick. PYTHON chooses the interpreter.
set -eu
cd "$(dirname "$0")/.."
if [ -z "${PYTHON:-}" ]; then
    if [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python3; fi
fi
export HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
exec "$PYTHON" benchmarks/gpu.py "$@"
