#!/usr/bin/env bash
# Puts .venv in place on a machine with NVIDIA GPUs: vLLM for CUDA, the learner, the gateway and the
# environments, pinned by requirements/gpu.txt. `make setup` does the same for machines without.
#
#   bash deploy/setup-gpu.sh
#
# Takes Python 3.11 where it is there, else has uv fetch it; SkyPilot leaves uv on its machines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAMP=.venv/.installed-gpu
[ -e "$STAMP" ] && [ ! pyproject.toml -nt "$STAMP" ] && [ ! requirements/gpu.txt -nt "$STAMP" ] && exit 0

export PATH="$HOME/.local/bin:$PATH"
# Triton compiles against Python's headers.
HEADERS='import ensurepip, os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")'
if python3.11 -c "$HEADERS" 2>/dev/null; then
  python3.11 -m venv --clear .venv
elif command -v uv >/dev/null; then
  uv venv --quiet --seed --clear --python 3.11 .venv
else
  echo "error: neither Python 3.11 with venv and headers nor uv is here; install one of them" >&2
  exit 1
fi
.venv/bin/python -m pip --disable-pip-version-check install --quiet \
  --constraint requirements/gpu.txt --editable ".[rollout,learner,env-gateway,environments,launcher,s3]"
touch "$STAMP"
