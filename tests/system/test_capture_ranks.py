"""Tensor parallelism: every rank reaches the seams with the same rows, and only the first may write."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import models
import pytest
from capture_client import Client, Reference, check
from sglang_server import CHUNK, Server


@pytest.mark.slow
def test_two_ranks_agree_and_only_the_first_writes(
    tiny_llama: Path, start_sglang: Callable[..., Server], tmp_path: Path
) -> None:
    client = Client(tmp_path, [2, 4, 7], models.HIDDEN["llama"], models.BLOCKS["llama"])
    client.server = start_sglang(tiny_llama, spec=client.write_spec(), args=["--tp-size", "2"])
    first, second = sorted(client.ready(), key=lambda r: r["tp_rank"])
    assert (first["tp_rank"], second["tp_rank"]) == (0, 1)
    assert first["error"] == second["error"] == ""
    assert first["layers_to_capture"] == second["layers_to_capture"] == client.layers
    assert "this rank" in first["seams"]["writer"]
    assert "another rank" in second["seams"]["writer"]
    reference = Reference(tiny_llama)
    for length in (19, 2 * CHUNK + 1):
        ids = models.prompt(length, length)
        got, record, _ = client.capture(ids)
        check(got, ids, client, reference)
        assert record["bytes"] == got.numel() * 2  # each byte once
