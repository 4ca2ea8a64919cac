"""Linear layers in bfloat16 on CPUs that have no instructions for it: in float32, rounded once at the end.

There torch falls back to a product that reaches a small part of what the same CPU does in float32
(``bench/cpu_linear.py`` measures it). A product of two bfloat16 numbers is exact in float32, and sums are kept in it.
"""

from __future__ import annotations

import torch
from torch.nn import functional

#: From so many rows on it pays to widen the weights, whatever they are; decoding one token does not.
FEWEST_ROWS = 16
_plain = functional.linear


def has_bfloat16() -> bool:
    """Whether oneDNN multiplies bfloat16 on this CPU (AVX-512 or AMX on x86)."""
    return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


def widened(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``torch.nn.functional.linear``: [..., in] and [out, in] give [..., out], of the same dtype."""
    if x.dtype != torch.bfloat16 or x.numel() < FEWEST_ROWS * x.shape[-1]:
        return _plain(x, weight, bias)
    return _plain(x.float(), weight.float(), None if bias is None else bias.float()).to(torch.bfloat16)


def install() -> None:
    """Have this process's linear layers multiply so, where the CPU has need of it."""
    if not has_bfloat16():
        functional.linear = widened
