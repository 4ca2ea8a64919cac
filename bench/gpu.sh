#!/usr/bin/env bash
# Extraction against plain prefill, and captured rows against Hugging Face, on one GPU.
#   bench/gpu.sh exact              rows against Hugging Face (qwen3, DeepSeek-V3 architecture)
#   bench/gpu.sh ranks              rows of two ranks against one's (two GPUs; all of those: bench/gpu2.sh)
#   bench/gpu.sh borrow             stop, a reparented child, a stranger, restore: with nvidia-smi and device memory
#   bench/gpu.sh SHAPE [ARGS...]    SHAPE: 8b, 1.7b, kimi (tiny: on a CPU); ARGS go to gpu_prefill.py
# Needs a Python with SGLang on PATH as $PYTHON (default python3). WHEELS=DIR installs a folder of wheels first.
# HOOK_TIME=FOLDER sums the time that the schedulers spend in launches and in the capture (bench/hook_time).
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-python3} SITE=${SITE:-/tmp/hsx-site} WORK=${WORK:-/tmp/hsx-bench} OUTPUT=${OUTPUT:-/dev/shm/hsx-bench}
if [ -n "${WHEELS:-}" ]; then
  [ -d "$SITE/sglang" ] || "$PYTHON" -m pip install -q --no-index --no-deps --no-compile --target "$SITE" "$WHEELS"/*.whl
  export PYTHONPATH="$SITE"
fi
if [ -n "${HOOK_TIME:-}" ]; then
  export BENCH_HOOK_TIME="$HOOK_TIME" PYTHONPATH="$PWD/bench/hook_time${PYTHONPATH:+:$PYTHONPATH}"
fi
export SGLANG_IS_FLASHINFER_AVAILABLE=false TVM_FFI_CACHE_DIR="$WORK/jit" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1
# NVLink multicast stays off, in whatever a server starts: not every machine that lends GPUs stands it
export NCCL_NVLS_ENABLE=0 TORCH_SYMM_MEM_DISABLE_MULTICAST=1 NVSHMEM_DISABLE_NVLS=1
[ -d /usr/local/cuda ] && export CUDA_HOME=/usr/local/cuda
mkdir -p "$WORK" "$OUTPUT"
case "${1:-}" in
  exact | ranks | borrow) what=$1; shift; exec "$PYTHON" "bench/gpu_$what.py" --work "$WORK/$what" "$@" ;;
  8b | 1.7b | kimi | tiny) shape=$1; shift; exec "$PYTHON" bench/gpu_prefill.py --shape "$shape" --output "$OUTPUT" --work "$WORK" "$@" ;;
  *) sed -n '2,9p' "$0"; exit 2 ;;
esac
