"""Token frequencies and the draft vocabulary, and every trainer's file of it."""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path

import host_data as h
import numpy as np
import pytest
import torch

from hsx_host import plan, vocab
from hsx_host.errors import BadInput


def test_only_masked_tokens_count() -> None:
    samples = [(np.array([1, 2, 2, 3]), np.array([0, 1, 1, 1])), (np.array([3, 0]), np.array([1, 0]))]
    assert vocab.frequencies(samples, 5).tolist() == [0, 0, 2, 2, 0]


def test_most_frequent_then_lowest_ids() -> None:
    d2t, t2d = vocab.mapping(np.array([0, 5, 0, 9, 5, 1]), 3)
    assert (d2t + np.arange(3)).tolist() == [1, 3, 4]
    assert t2d.tolist() == [False, True, False, True, True, False]
    d2t, t2d = vocab.mapping(np.array([0, 0, 0, 0, 7]), 3)
    assert (d2t + np.arange(3)).tolist() == [0, 1, 4], "what is missing is filled with the lowest ids"
    assert t2d.sum() == 3


def test_whole_vocabulary_is_the_identity() -> None:
    d2t, t2d = vocab.mapping(np.array([0, 1, 2]), 3)
    assert d2t.tolist() == [0, 0, 0]
    assert t2d.all()


@pytest.mark.parametrize(
    ("counts", "size", "field"), [([1, 1], 3, "--size"), ([1], 0, "--size"), ([0], 1, "data.path")]
)
def test_what_can_not_be(counts: list[int], size: int, field: str) -> None:
    with h.refuses(BadInput, field):
        vocab.mapping(np.array(counts), size)


def test_files(tmp_path: Path) -> None:
    lines = [h.line([5, 5, 6, 7], [0, 1, 1, 1]), h.line([6, 299], [1, 0]), h.line([9], [1])]
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", lines))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec, rows=[0, 1])
    result = vocab.run(spec, Namespace(size=2))
    assert (result.tokens, result.different, result.covered) == (4, 3, 0.75)
    assert (result.draft_vocab_size, result.target_vocab_size) == (2, h.VOCAB)
    assert torch.load(result.files["token_freq"], weights_only=True) == {5: 1, 6: 2, 7: 1}, "row 2 is not published"
    d2t, t2d = np.load(result.files["d2t"]), np.load(result.files["t2d"])
    assert (d2t.dtype, t2d.dtype, t2d.shape) == (np.int64, np.bool_, (h.VOCAB,))
    assert (d2t + np.arange(2)).tolist() == np.flatnonzero(t2d).tolist() == [5, 6]
    both = torch.load(result.files["specforge"], weights_only=True)
    assert (both["d2t"].tolist(), both["t2d"].tolist()) == (d2t.tolist(), t2d.tolist())
    assert torch.load(result.files["modelopt"], weights_only=True).tolist() == d2t.tolist()
    assert not list((dataset / "v1").glob("*freq*"))
