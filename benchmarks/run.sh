#!/usr/bin/env bash
# Make an environment with all peers, and run every comparison, one after the other.
#
#     bash benchmarks/run.sh                                   # generated images
#     PHOTOS=FOLDER CIFAR=FOLDER bash benchmarks/run.sh        # and yours: FOLDER/train/<class>/
#
# It needs uv (https://docs.astral.sh/uv/), Linux, an otherwise idle machine, and some hours.
# UV_TORCH_BACKEND=cpu makes the environment smaller; PEERS=PATH is another place for it.
set -euo pipefail
cd "$(dirname "$0")/.."

PEERS=${PEERS:-build/peers}
[ -x "$PEERS/bin/python" ] || uv venv "$PEERS"
uv pip install --python "$PEERS/bin/python" \
    --requirement benchmarks/requirements.txt \
    --requirement '{{cookiecutter.project_slug}}/pyproject.toml'

compare() {
    echo "== $*"
    "$PEERS/bin/python" "benchmarks/$1.py" "${@:2}"
}

compare loaders --pixels
compare loaders
compare resident
compare overhead
compare memory
compare training
if [ -n "${PHOTOS:-}" ]; then
    compare loaders --pixels --root "$PHOTOS"
    compare loaders --root "$PHOTOS"
    compare training --root "$PHOTOS"
fi
if [ -n "${CIFAR:-}" ]; then
    compare resident --root "$CIFAR"
fi
