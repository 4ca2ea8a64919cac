"""Chains of draft tokens on a CPU: the tree that is a line, and greedy verification, against the definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch

eagle: Any = pytest.importorskip("hsx_cpu.eagle")


def tree(lengths: list[int], n: int) -> tuple[torch.Tensor, ...]:
    requests = len(lengths)
    positions = torch.empty(requests * n, dtype=torch.long)
    links = torch.full((3, requests, n), -1, dtype=torch.long)
    eagle.build_chain(None, None, torch.tensor(lengths), torch.ones(0), positions, *links, 1, n - 1, n)
    return positions, *links


def test_a_chains_tree_is_a_line() -> None:
    positions, index, following, sibling = tree([7, 20], 4)
    assert positions.tolist() == [7, 8, 9, 10, 20, 21, 22, 23]
    assert index.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert following.tolist() == [[1, 2, 3, -1]] * 2
    assert sibling.tolist() == [[-1] * 4] * 2
    with pytest.raises(NotImplementedError, match="topk 1"):
        eagle.build_chain(None, None, torch.tensor([1]), None, None, None, None, None, 2, 3, 4)


def test_draft_tokens_count_until_the_first_wrong_one() -> None:
    """Rows: all three right, the second wrong, the first wrong, and right again behind a wrong one."""
    candidates = torch.tensor([[9, 1, 2, 3], [9, 1, 0, 3], [9, 0, 2, 3], [9, 1, 0, 3]])
    target = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 9]])
    requests, n = candidates.shape
    predicts = torch.zeros(requests * n, dtype=torch.int32)
    accepted = torch.full((requests, n), -1, dtype=torch.int32)
    counts = torch.empty(requests, dtype=torch.int32)
    _, index, _, _ = tree([5] * requests, n)
    eagle.verify_chain(predicts, accepted, counts, candidates, index, target_predict=target, topk=1)
    assert counts.tolist() == [3, 1, 0, 1]
    assert accepted.tolist() == [[0, 1, 2, 3], [4, 5, -1, -1], [8, -1, -1, -1], [12, 13, -1, -1]]
    said = [[int(predicts[i]) for i in row if i >= 0] for row in accepted.tolist()]
    assert said == [[1, 2, 3, 4], [1, 2], [1], [1, 2]], "the target's own token stands behind the last accepted one"


def test_places_in_the_cache() -> None:
    rows = torch.arange(40).reshape(2, 20)
    found = eagle.cache_locs(
        req_pool_indices=torch.tensor([1, 0]), req_to_token=rows, start_offset=torch.tensor([3, 5]),
        end_offset=torch.tensor([5, 7]),
    )  # fmt: skip
    assert found.tolist() == [23, 24, 5, 6]
    assert found.dtype == torch.int64
