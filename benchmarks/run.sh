#!/usr/bin/env bash
# Make an environment with all peers, run every comparison, one after the other, and write the figures.
#
#     bash benchmarks/run.sh                                          # generated images
#     PHOTOS=FOLDER CIFAR=FOLDER FLOWERS=FOLDER bash benchmarks/run.sh   # yours: FOLDER/train/<class>/
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
compare input_formats
compare policies
compare overhead
compare precision
compare memory
compare scale
compare model_parallel
compare training
compare recipes --only shapes
compare search --folder build/search
if [ -n "${PHOTOS:-}" ]; then
    compare loaders --pixels --root "$PHOTOS"
    compare loaders --root "$PHOTOS"
    compare training --root "$PHOTOS"
    compare near_duplicates --files "$PHOTOS"
fi
if [ -n "${CIFAR:-}" ]; then
    compare resident --root "$CIFAR"
    compare recipes --only cifar10_speed --cifar "$CIFAR"
fi
if [ -n "${FLOWERS:-}" ]; then
    compare recipes --only folder --flowers "$FLOWERS"
    compare transfer --sets "$FLOWERS"
    compare trust --flowers "$FLOWERS"
fi
"$PEERS/bin/python" benchmarks/figures.py
