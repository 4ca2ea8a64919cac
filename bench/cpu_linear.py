"""Linear layers of the demo's model on this CPU: torch's own in bfloat16 against the CPU platform's, by rows.

Usage: PYTHONPATH=include/patches/hsx_cpu $HSX_HOST_PYTHON bench/cpu_linear.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch.nn import functional

from hsx_cpu import linear

ROUNDS, SECONDS = 5, 0.3
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # SmolLM2-135M: qkv, output, gate and up, down


def main() -> int:
    """Print whether this CPU has bfloat16, then a table."""
    weights = [torch.randn(shape).bfloat16() for shape in SHAPES]
    print(f"bfloat16 of its own: {linear.has_bfloat16()}; {torch.get_num_threads()} threads")
    print("| rows | torch, GFLOP/s | in float32, GFLOP/s | ratio |\n|---|---|---|---|")
    for rows in (1, 8, 16, 64, 256, 1024):
        inputs = [torch.randn(rows, w.shape[1]).bfloat16() for w in weights]
        rates = [(rate(functional.linear, inputs, weights), rate(linear.widened, inputs, weights))
                 for _ in range(ROUNDS)]  # fmt: skip
        ratio = statistics.median(ours / plain for plain, ours in rates)
        plain, ours = (statistics.median(column) for column in zip(*rates, strict=True))
        print(f"| {rows:,} | {plain:.1f} | {ours:.1f} | {ratio:.2f} |")
    return 0


def rate(product: Callable[..., torch.Tensor], inputs: list[torch.Tensor], weights: list[torch.Tensor]) -> float:
    """GFLOP/s of one layer's products, over and over."""
    work = sum(2 * x.shape[0] * w.numel() for x, w in zip(inputs, weights, strict=True))
    count, began = 0, time.perf_counter()
    while (took := time.perf_counter() - began) < SECONDS or not count:
        for x, w in zip(inputs, weights, strict=True):
            product(x, w)
        count += 1
    return count * work / took / 1e9


if __name__ == "__main__":
    raise SystemExit(main())
