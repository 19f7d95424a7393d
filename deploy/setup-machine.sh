#!/usr/bin/env bash
# Sets up .venv on a machine rented for a run; a spec names it as `launcher.sky.setup`:
#
#   bash deploy/setup-machine.sh
#
# With an NVIDIA GPU it installs requirements/gpu.txt: vLLM for CUDA, the learner and everything else.
# Without one it installs requirements/machine.txt: the gateway and the environments. (`make setup`
# is for a machine that does everything without a GPU.) It uses an installed Python 3.11, or lets uv
# fetch one; SkyPilot installs uv on its machines.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

PACKAGES=requirements/machine.txt
if [ -e /dev/nvidia0 ] || command -v nvidia-smi >/dev/null; then
  PACKAGES=requirements/gpu.txt
fi
STAMP=.venv/.installed-$(basename "$PACKAGES" .txt)
if [ -e "$STAMP" ] && [ ! pyproject.toml -nt "$STAMP" ] && [ ! "$PACKAGES" -nt "$STAMP" ]; then
  exit 0
fi

export PATH="$HOME/.local/bin:$PATH"
# Triton compiles against Python's headers.
HEADERS='import ensurepip, os, sysconfig as s; os.stat(s.get_path("include") + "/Python.h")'
if python3.11 -c "$HEADERS" 2>/dev/null; then
  python3.11 -m venv --clear .venv
elif command -v uv >/dev/null; then
  uv venv --quiet --seed --clear --python 3.11 .venv
else
  echo "error: found neither Python 3.11 with venv and headers nor uv; install one of them" >&2
  exit 1
fi
install() {
  .venv/bin/python -m pip --disable-pip-version-check install --quiet --no-deps "$@"
}
install --require-hashes --requirement requirements/build.txt
install --require-hashes --requirement "$PACKAGES"
install --no-build-isolation --editable .
touch "$STAMP"
