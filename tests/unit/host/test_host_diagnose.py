"""Data sets that were made wrong and say of themselves that they are right: verify says which fault it is."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import numpy as np
import pytest
import torch

from hsx_host import contract as c
from hsx_host import convert, diagnose, plan, proof, verify
from hsx_host.errors import Refused
from hsx_host.manifest import Published, newest, read_lines, rewrite
from hsx_host.shards import ShardFiles, shard_ids


@pytest.fixture
def made(tmp_path: Path) -> tuple[c.RunSpec, Path]:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)), proof_samples=6)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


def rewritten(spec: c.RunSpec, dataset: Path, change: Any, masked: Any = lambda mask: mask) -> None:
    """Every sample's file anew with ``change(ids, planes)`` and checksums that fit, as a wrong extraction makes it."""
    for shard in shard_ids(dataset):
        files = ShardFiles(dataset, shard)
        lines = newest(read_lines(files.manifest, Published)[0])
        for row, line in lines.items():
            path = dataset / line.file
            body = torch.load(path, weights_only=True)
            ids, planes = change(body["input_ids"], body["hidden_states"])
            path.unlink()
            crcs = h.sample_file(path, ids.numpy(), masked(body["loss_mask"]).numpy(), [p.contiguous() for p in planes])
            lines[row] = replace(line, crc32=crcs, bytes=path.stat().st_size)
        rewrite(files.manifest, lines.values())


def said(spec: c.RunSpec, **options: Any) -> str:
    with pytest.raises(Refused) as error:
        verify.run(spec, Namespace(**{"deep": False, "shard": None, "window_ended": False, "reference": 0, **options}))
    return str(error.value)


@pytest.mark.parametrize(
    ("roll", "word"), [(-1, "shifted by one, the first is missing"), (1, "shifted by one, the last is missing")]
)
def test_shifted_ids(made: tuple[c.RunSpec, Path], roll: int, word: str) -> None:
    spec, dataset = made
    rewritten(spec, dataset, lambda ids, planes: (ids.roll(roll), planes))
    assert word in said(spec)


def test_other_ids(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    rewritten(spec, dataset, lambda ids, planes: (ids.flip(0), planes))
    assert "holds other token ids than the data file" in said(spec)


def test_another_mask(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    rewritten(spec, dataset, lambda ids, planes: (ids, planes), masked=lambda mask: 1 - mask)
    assert "holds another loss mask than the data file" in said(spec)


def test_after_norm_for_before_norm(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    norm = proof.FinalNorm(dataset / proof.NORM_FILE)
    rewritten(spec, dataset, lambda ids, planes: (ids, [*planes[:-1], norm.apply(planes[-1])]))
    assert "the final hidden state is after the norm, dataset.json says before" in said(spec)


def test_before_norm_for_after_norm(tmp_path: Path) -> None:
    data = h.write_lines(tmp_path / "d.jsonl", h.samples(6))
    spec = h.make_spec(tmp_path, data, formats=["specforge"], proof_samples=6)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    h.publish(spec)
    one = convert.of_dataset(spec)
    assert diagnose.norm(one, one.lines.values()) == ""
    rule = proof.FinalNorm(one.norm_file)
    before = np.concatenate([3 * diagnose._final_rows(one, line) for line in one.lines.values()])
    assert not rule.looks_normed(before)


def test_swapped_planes_by_their_checksums(made: tuple[c.RunSpec, Path]) -> None:
    """The file was changed after it was published: the manifest still knows whose data is where."""
    spec, dataset = made
    path = dataset / "v1/data_5.pt"
    body = torch.load(path, weights_only=True)
    a, b, d, last = body["hidden_states"]
    path.unlink()
    h.sample_file(path, body["input_ids"].numpy(), body["loss_mask"].numpy(), [b, a, d, last])
    text = said(spec)
    assert "the order of layers is swapped: layer_1 holds layer_3, layer_3 holds layer_1" in text


def states_of_a_model(tokens: int = 12, blocks: int = 8) -> list[np.ndarray[Any, Any]]:
    """A residual stream: each block adds a third of a row's length. The last one stands for the normed final."""
    rng = np.random.default_rng(0)
    stream = [rng.normal(size=(tokens, 32))]
    for _ in range(blocks):
        stream.append(stream[-1] + 0.35 * rng.normal(size=(tokens, 32)) * np.abs(stream[-1]).mean())
    return [*stream, stream[-1] / np.linalg.norm(stream[-1], axis=-1, keepdims=True) * np.sqrt(32)]


def test_planes_against_a_reference() -> None:
    states = states_of_a_model()
    rng = np.random.default_rng(1)

    def rough(k: int) -> Any:
        return states[k] * (1 + 0.004 * rng.normal(size=states[k].shape))

    assert diagnose._layer(3, rough(3), states) == ""
    assert "holds what enters block 4 (off by +1)" in diagnose._layer(3, rough(4), states)
    assert "holds what enters block 2 (off by -1)" in diagnose._layer(3, rough(2), states)
    assert "block 6 (another layer, or the order is swapped)" in diagnose._layer(3, rough(6), states)
    assert "shifted by one" in diagnose._layer(3, np.roll(rough(3), 1, axis=0), states)
    assert "in another order" in diagnose._layer(3, rough(3)[rng.permutation(12)], states)
    assert "of other tokens" in diagnose._layer(3, rng.normal(size=states[3].shape), states)
    before, after = states[-2] * 5, states[-1]
    assert diagnose._final(before, before, after, "before_norm") == ""
    assert "final is after the norm" in diagnose._final(after, before, after, "before_norm")
    assert "final is before the norm" in diagnose._final(before, before, after, "after_norm")
