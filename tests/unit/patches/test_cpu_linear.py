"""Linear layers in float32 where a CPU has no bfloat16: the same numbers as in float64 within one rounding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

linear: Any = pytest.importorskip("hsx_cpu.linear")


@pytest.mark.parametrize("shape", [(1, 64), (15, 64), (16, 64), (300, 64), (4, 5, 64), (0, 64)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    torch.manual_seed(0)
    x, w = torch.randn(shape).bfloat16(), torch.randn(96, 64).bfloat16()
    b = torch.randn(96).bfloat16() if bias else None
    found = linear.widened(x, w, b)
    assert (found.dtype, found.shape) == (torch.bfloat16, (*shape[:-1], 96))
    exact = functional.linear(x.double(), w.double(), None if b is None else b.double())
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)
    if len(x.reshape(-1, 64)) >= linear.FEWEST_ROWS:  # one rounding to 8 bits, and float32's sums
        torch.testing.assert_close(found.double(), exact, rtol=2**-8 * 1.001, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_are_left_alone(dtype: torch.dtype) -> None:
    x, w = torch.randn(32, 64).to(dtype), torch.randn(8, 64).to(dtype)
    assert torch.equal(linear.widened(x, w), functional.linear(x, w))


@pytest.mark.parametrize("has", [True, False])
def test_only_a_cpu_that_needs_it_gets_it(monkeypatch: pytest.MonkeyPatch, has: bool) -> None:
    plain = functional.linear
    monkeypatch.setattr(functional, "linear", plain)  # and back again
    monkeypatch.setattr(linear, "has_bfloat16", lambda: has)
    linear.install()
    assert functional.linear is (plain if has else linear.widened)
