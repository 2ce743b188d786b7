#!/usr/bin/env bash
# On a machine with CUDA and without a network: runs the GPU tests and figures of this bundle.
# `gpu/run.sh --help` explains; PYTHON=... chooses the interpreter that has torch.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# -P: the bundle's package, not one of that name in the folder that this is called from; -B: the
# bundle stays as it came.
PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}" exec "${PYTHON:-python3}" -B -P -m gpu.session "$@"
