"""A mixture of experts on the CPU, a model that breaks on some tokens, and the version that is under test."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import pytest
import torch
from capture_client import Client, Reference, check

from hsx_host import preflight, probe

Start = Callable[..., Client]


def row_errors(got: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    """Relative error of each row."""
    got, want = got.float(), want.float()
    return (got - want).norm(dim=-1) / want.norm(dim=-1)


def test_a_mixture_of_experts(tmp_path: Path, capturing: Start, record_property: Callable[[str, object], None]) -> None:
    """bf16 noise sends a token to another expert now and then, and attention hands that on: the median row tells the
    layer, not the whole plane. It was off by 0.007 to 0.114 from Hugging Face; another layer's is off by 0.5 and more.

    The probe compares a prompt at once and alone, in the same engine: what that is off by is measured here.
    """
    model = models.build("qwen3_moe", tmp_path / "moe")
    client, reference = capturing(model, "qwen3_moe"), Reference(model)
    prompts = [models.prompt(i, n) for i, n in enumerate([19, 64, 130, 257, 300, 513, 24, 59])]
    alone = [client.capture(ids)[0] for ids in prompts]
    for got, ids in zip(alone, prompts, strict=True):
        states, before = reference.states(ids)
        for plane, k in zip(got, client.layers, strict=False):
            errors = [float(row_errors(plane, state).median()) for state in states]
            nearest, second = sorted(errors)[:2]
            assert errors[k] == nearest < min(0.2, second / 3), (k, errors)
        assert float(row_errors(got[-1], before).median()) < 0.2
    with ThreadPoolExecutor(len(prompts)) as pool:
        at_once = [got for got, _, _ in pool.map(client.capture, prompts)]
    worst = max(
        probe.difference(a, b)
        for one, other in zip(at_once, alone, strict=True)
        for a, b in zip(one, other, strict=True)
    )
    record_property("moe_at_once_and_alone", worst)
    print(f"a mixture of experts, at once and alone: off by {worst:.4f} at most, {probe.SAME_ROWS} is allowed")
    assert worst < probe.SAME_ROWS


BAD = {7: float("nan"), 8: float("inf"), 9: 0.0}


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of long context with NaN, Inf and zero in the embedding of three tokens."""
    return models.build("llama", tmp_path_factory.mktemp("odd") / "llama", context=12288, spoil=BAD)


def fine_prompt(seed: int, length: int) -> list[int]:
    return [10 if i in BAD else i for i in models.prompt(seed, length)]


def test_long_prompts(odd: Path, capturing: Start) -> None:
    """The reference run's longest sample, and multiples of the chunk."""
    client, reference = capturing(odd, chunk=2048, args=["--context-length", "12288"]), Reference(odd)
    for length in (2047, 2048, 2049, 4096, 4097, 10_648):
        ids = fine_prompt(length, length)
        got, record, _ = client.capture(ids)
        check(got, ids, client, reference)
        assert record["rows"] == length


def test_rows_that_are_no_numbers_are_told_and_nobody_else_suffers(odd: Path, capturing: Start) -> None:
    """Every other prompt is as always, before and after."""
    client = capturing(odd, chunk=2048, args=["--context-length", "12288"])
    fine = fine_prompt(5, 90)
    want, _, _ = client.capture(fine)
    with ThreadPoolExecutor(4) as pool:
        others = [pool.submit(client.capture, ids) for ids in ([20, 7, 21, 22], [20, 8, 21, 22], [9] * 30)]
        beside = pool.submit(client.capture, fine)
        nan, inf, zero = (f.result()[1]["planes"] for f in others)
        assert torch.isfinite(beside.result()[0].float()).all()
    assert [p["finite"] for p in nan] == [False] * 4
    assert [p["finite"] for p in inf] == [False] * 4
    assert [p["zero"] for p in zero] == [True] * 4
    got, record, _ = client.capture(fine)
    assert torch.equal(got, want)
    assert all(p["finite"] and not p["zero"] and not p["constant"] for p in record["planes"])


def test_the_version_is_in_range_and_the_plugin_says_it(odd: Path, capturing: Start) -> None:
    version = importlib.metadata.version("sglang")
    preflight.check_version(version)
    (ready,) = capturing(odd, chunk=2048, args=["--context-length", "12288"]).ready()
    assert ready["sglang"].split("+")[0] == version.split("+")[0]
    assert ready["error"] == ""


@pytest.mark.parametrize("version", ["0.5.10", "0.6.0", "0.6.0rc1", "0.5.11.dev1"])
def test_others_are_refused_by_name(version: str) -> None:
    with pytest.raises(preflight.BadInput, match=version):
        preflight.check_version(version)
