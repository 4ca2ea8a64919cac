"""Rows are right whatever the scheduler does: chunks, orders, overlap, data parallelism, a tiny cache, aborts."""

from __future__ import annotations

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import models
import pytest
import torch
from capture_client import Client, Reference, check, error

Start = Callable[..., Client]


def at_once(client: Client, prompts: list[list[int]]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [got for got, _, _ in pool.map(client.capture, prompts)]


def check_all(client: Client, reference: Reference, prompts: list[list[int]]) -> None:
    for got, ids in zip(at_once(client, prompts), prompts, strict=True):
        check(got, ids, client, reference)


@pytest.mark.parametrize(("chunk", "overlap"), [(256, False), (-1, True), (64, True)])
def test_sixty_four_at_once_in_any_order_equal_each_alone(
    tiny_llama: Path, capturing: Start, chunk: int, overlap: bool
) -> None:
    """Chunks from 64 to none, with the overlap scheduler (SGLang's default) and without it; sorted and shuffled;
    lengths around the chunk; shared beginnings and equal prompts."""
    args = [] if overlap else ["--disable-overlap-schedule"]
    client, reference = capturing(tiny_llama, chunk=chunk, args=args), Reference(tiny_llama)
    size = abs(chunk) if chunk > 0 else 200
    around = [1, 2, 19, size - 1, size, size + 1, 2 * size, 2 * size + 1]
    prompts = [models.prompt(i, n) for i, n in enumerate(around)]
    prompts += [models.prompt(50, 40) + models.prompt(60 + i, 10 + i) for i in range(8)]
    prompts += [models.prompt(99, 70)] * 2
    prompts += [models.prompt(200 + i, 5 + 3 * i) for i in range(64 - len(prompts))]
    alone = [client.capture(ids)[0] for ids in prompts]
    for got, ids in zip(alone, prompts, strict=True):
        check(got, ids, client, reference)
    shuffled = random.Random(0).sample(range(64), 64)
    for order in (sorted(range(64), key=lambda i: len(prompts[i])), shuffled):
        for i, got in zip(order, at_once(client, [prompts[i] for i in order]), strict=True):
            assert error(got, alone[i]) < 0.02, (i, len(prompts[i]))


def test_an_aborted_request_leaves_nothing_and_disturbs_nobody(tiny_llama: Path, capturing: Start) -> None:
    client, reference = capturing(tiny_llama, chunk=64, args=[]), Reference(tiny_llama)
    server = client.server
    assert server is not None
    long, other = models.prompt(1, 1900), models.prompt(2, 150)
    with ThreadPoolExecutor(2) as pool:
        for _ in range(3):
            rid = client.ask(long)
            asked = pool.submit(server.generate, long, rid=rid)
            beside = pool.submit(client.capture, other)
            time.sleep(0.05)
            (client.spool / f"{rid}.json").unlink()  # as a client that gives up does
            Path(client.requests[rid]["path"]).unlink()
            body = json.dumps({"rid": rid}).encode()
            post = urllib.request.Request(f"{server.url}/abort_request", body, {"Content-Type": "application/json"})
            urllib.request.urlopen(post, timeout=30).read()
            ended = asked.exception()  # none where it was done before the abort came
            assert ended is None or (isinstance(ended, urllib.error.HTTPError) and ended.code == 400)
            check(beside.result()[0], other, client, reference)
            assert not Path(client.requests[rid]["path"]).exists()
            assert not (client.spool / f"{rid}.done.json").exists()
    got, _, _ = client.capture(long)
    check(got, long, client, reference)


def test_two_data_parallel_ranks(tiny_llama: Path, capturing: Start) -> None:
    client = capturing(tiny_llama, args=["--dp-size", "2"])
    assert len({ready["pid"] for ready in client.ready()}) == 2
    assert [ready["error"] for ready in client.ready()] == ["", ""]
    check_all(client, Reference(tiny_llama), [models.prompt(i, 3 + 70 * i) for i in range(8)])


def test_retraction_and_a_tiny_cache(tiny_llama: Path, capturing: Start) -> None:
    """Requests are thrown out of the cache and begin again, strangers' too: rows are rewritten, not mixed.

    Captured requests generate as well here, so that they themselves are thrown out after their prefill.
    """
    client = capturing(
        tiny_llama, chunk=64, args=["--max-total-tokens", "1200"],
        env={"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "3"},
    )  # fmt: skip
    server, reference = client.server, Reference(tiny_llama)
    assert server is not None
    prompts = [models.prompt(i, 20 + 25 * i) for i in range(10)]
    with ThreadPoolExecutor(24) as pool:
        strangers = [pool.submit(server.generate, models.prompt(100 + i, 30), tokens=60) for i in range(12)]
        rids = [client.ask(ids) for ids in prompts]
        answers = [
            pool.submit(server.generate, ids, rid=rid, tokens=24) for ids, rid in zip(prompts, rids, strict=True)
        ]
        for answer in answers:
            assert answer.result()["meta_info"]["completion_tokens"] == 24
        for stranger in strangers:
            assert stranger.result()["meta_info"]["completion_tokens"] == 60
    for ids, rid in zip(prompts, rids, strict=True):
        record = client.record(rid)
        assert record["error"] == ""
        assert record["rows"] == len(ids)
        check(client.tensor(rid), ids, client, reference)
    assert "etract" in server.log.read_text(errors="replace"), "nothing was retracted: the test shows nothing"
