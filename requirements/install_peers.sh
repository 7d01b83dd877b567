#!/usr/bin/env bash
# Make .venv-peers/trl and .venv-peers/verl, what `make bench-peers` compares with: ./requirements/install_peers.sh [trl] [verl]
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3.11}
peers=("$@")
[ ${#peers[@]} -gt 0 ] || peers=(trl verl)

for peer in "${peers[@]}"; do
  lock=requirements/peers-$peer.txt venv=.venv-peers/$peer
  [ -f "$lock" ] || { printf 'no %s; peers are trl and verl\n' "$lock" >&2; exit 2; }
  stamp=$venv/.installed-$(sha256sum "$lock" | cut -c1-16)
  [ -e "$stamp" ] && continue
  [ -x "$venv/bin/python" ] || "$PYTHON" -m venv "$venv"
  printf 'installing %s into %s (a minute or two the first time)\n' "$lock" "$venv" >&2
  "$venv/bin/pip" install --quiet --no-deps -r "$lock"
  rm -f "$venv"/.installed-*
  touch "$stamp"
done
