#!/usr/bin/env bash
# The whole circle (see circle.py): samples by the model itself, extraction, EAGLE-3 training, serving, controls.
#   bench/circle.sh gpu MODEL [ARGS...]   on one GPU, 4600 samples: about 10 minutes on an H200
#   bench/circle.sh cpu MODEL [ARGS...]   on a CPU, 160 samples of a small model: hours on two cores
#   bench/circle.sh tiny [ARGS...]        on a CPU, with a random model of 8 blocks: minutes; shows the way and the controls
# Needs a Python with SGLang as $PYTHON (default python3) and one with speculators 0.7 as $TRAINER_PYTHON (default the
# same). Where nothing may be installed: WHEELS=DIR and TRAINER_WHEELS=DIR unpack folders of wheels first.
# MODEL in parts (MODEL.part0, MODEL.part1, ... of a tar file) is put together first.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} TRAINER_PYTHON=${TRAINER_PYTHON:-$PYTHON} WORK=${WORK:-build/circle}
SITE=${SITE:-/tmp/hsx-site} TRAINER_SITE=${TRAINER_SITE:-/tmp/hsx-trainer-site}
unpack() { # WHEELS SITE
  [ -d "$2" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$2" "$1"/*.whl
}
path=()
if [ -n "${WHEELS:-}" ]; then unpack "$WHEELS" "$SITE"; export PYTHONPATH="$SITE"; fi
if [ -n "${TRAINER_WHEELS:-}" ]; then
  unpack "$TRAINER_WHEELS" "$TRAINER_SITE"; path=(--trainer-path "$TRAINER_SITE${WHEELS:+:$SITE}")
fi
export HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1 SGLANG_IS_FLASHINFER_AVAILABLE=${SGLANG_IS_FLASHINFER_AVAILABLE:-false}
what=${1:-} && shift || true
case "$what" in
  gpu | cpu)
    model=$1 && shift
    if [ ! -d "$model" ] && [ -e "$model.part0" ]; then mkdir -p "$model" && cat "$model".part* | tar -x -C "$model"; fi
    ;;
  tiny)
    model=$WORK-model
    [ -d "$model" ] || PYTHONPATH="tests/system:${PYTHONPATH:-}" "$PYTHON" -c \
      "import models, pathlib, sys; models.build('llama', pathlib.Path(sys.argv[1]))" "$model"
    ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
common=(bench/circle.py --model "$model" --work "$WORK" --trainer-python "$TRAINER_PYTHON" "${path[@]}")
case "$what" in
  gpu) exec "$PYTHON" "${common[@]}" --device cuda --samples 4600 --held-out 60 --answer 160 --concurrency 128 \
         --train-args "--draft-vocab-size 16384 --epochs 15 --lr 1e-3 --total-seq-len 4096" "$@" ;;
  cpu) exec "$PYTHON" "${common[@]}" --samples 160 --held-out 12 --answer 48 --concurrency 8 \
         --train-args "--draft-vocab-size 2048 --epochs 10 --lr 1e-3 --total-seq-len 256 --threads 2" "$@" ;;
  tiny) exec "$PYTHON" "${common[@]}" --prompts ids --layers 2 4 6 --samples 240 --held-out 12 --answer 48 --concurrency 8 \
          --train-args "--draft-vocab-size 512 --epochs 10 --lr 2e-3 --total-seq-len 256 --threads 1" "$@" ;;
esac
