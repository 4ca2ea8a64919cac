#!/usr/bin/env bash
# Two GPUs of one host: what tensor and data parallel ranks capture, how fast, and that both GPUs are given back.
#   bench/gpu2.sh [ranks] [tensor] [data] [borrow]     default: all of them, in this order
#   CPU=1 bench/gpu2.sh ...                            the same lines with tiny models on two CPU ranks
# Environment as for bench/gpu.sh. Every step has LIMIT seconds (600); a step that fails does not stop the next.
set -uo pipefail
cd "$(dirname "$0")/.."
if [ "${CPU:-}" ]; then
  dense=(tiny --chunk 256 --ring-mib 32 --samples 24 --rounds 1)
  mixture=("${dense[@]}") cpu=(--cpu)
else
  dense=(8b --samples "${DENSE:-1200}") mixture=(kimi --samples "${MIXTURE:-500}")
  cpu=()
fi
tensor="--tp-size 2" port=${PORT:-30000} failed=0
step() {
  echo "== $*"
  timeout -k 60 -s INT "${LIMIT:-600}" bench/gpu.sh "$@" || { echo "== failed with $?: $*"; failed=1; }
}
for what in ${@:-ranks tensor data borrow}; do
  case "$what" in
    ranks) step ranks "${cpu[@]}" ;;
    tensor) step "${dense[@]}" --port "$port" --server-args="$tensor"; step "${mixture[@]}" --port "$port" --server-args="$tensor" ;;
    data) step "${dense[@]}" --port "$port" --server-args="--dp-size 2" ;;
    borrow) step borrow "${cpu[@]}" --server-args="$tensor" ;;
    *) sed -n '2,5p' "$0"; exit 2 ;;
  esac
done
exit "$failed"
