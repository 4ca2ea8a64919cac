"""The capture plugin inside a real SGLang: every row of every sample against Hugging Face's own forward pass."""

from __future__ import annotations

import zlib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import models
import pytest
import torch
from capture_client import Client, Reference, check, error
from sglang_server import CHUNK

LENGTHS = [1, 2, 19, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 1000]


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def folder(kind: str, request: pytest.FixtureRequest) -> Path:
    return Path(request.getfixturevalue(f"tiny_{kind}"))


@pytest.fixture(scope="module")
def client(kind: str, request: pytest.FixtureRequest) -> Client:
    return cast(Client, request.getfixturevalue(f"capturing_{kind}"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> Reference:
    return Reference(folder)


def test_ready_says_what_is_proved(client: Client, kind: str) -> None:
    (ready,) = client.ready()
    assert ready["error"] == ""
    assert ready["layers_to_capture"] == client.layers
    assert (ready["num_blocks"], ready["hidden_size"]) == (models.BLOCKS[kind], models.HIDDEN[kind])
    assert (ready["norm_class"], ready["norm_eps"], ready["tp_rank"]) == ("RMSNorm", 1e-5, 0)
    assert ready["sglang"].startswith("0.5.")
    assert set(ready["seams"]) == {
        "ModelRunner.load_model", "LogitsProcessor.forward", "layers_to_capture", "norm", "norm.forward", "writer",
        "checksum",
    }  # fmt: skip


def test_the_norm_is_kept_beside(client: Client, folder: Path) -> None:
    from safetensors.torch import load_file

    norm, weights = load_file(client.spool / "final_norm.safetensors"), load_file(folder / "model.safetensors")
    assert torch.equal(norm["weight"], weights["model.norm.weight"])
    assert norm["eps"].dtype == torch.float64
    assert norm["eps"].tolist() == [1e-5]


@pytest.mark.parametrize("length", LENGTHS)
def test_every_row_is_hugging_faces(client: Client, reference: Reference, length: int) -> None:
    ids = models.prompt(length, length)
    got, record, token = client.capture(ids)
    check(got, ids, client, reference)
    logits = reference.next_logits(got[-1, -1])
    assert logits[token] >= logits.max() - 2**-6 * logits.abs().max()  # the argmax, up to bf16 ties
    assert record["rows"] == length
    assert record["bytes"] == got.numel() * 2
    assert record["chunks"] >= -(-length // CHUNK)
    for plane, p in zip(got, record["planes"], strict=True):
        assert p["crc32"] == zlib.crc32(plane.contiguous().view(torch.uint8).numpy())
        assert (p["finite"], p["zero"], p["constant"]) == (True, False, False)
    assert [p["name"] for p in record["planes"]] == [*map(str, client.layers), "final"]


@pytest.mark.parametrize("layout", ["rows", "mixed"])
@pytest.mark.parametrize("length", [1, CHUNK + 1, 1000])
def test_layouts_hold_the_same_rows(client: Client, layout: str, length: int) -> None:
    ids = models.prompt(length, length)
    want, one, _ = client.capture(ids, "planes")
    got, other, _ = client.capture(ids, layout)
    assert torch.equal(got, want)
    beside = got if layout == "rows" else got[:-1]
    together = zlib.crc32(beside.transpose(0, 1).contiguous().view(torch.uint8).numpy())
    assert [p["crc32"] for p in other["planes"]][: len(beside)] == [together] * len(beside)
    if layout == "mixed":
        assert other["planes"][-1]["crc32"] == one["planes"][-1]["crc32"]


def together(client: Client, prompts: list[list[int]], layouts: list[str]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(prompts)) as pool:
        return [got for got, _, _ in pool.map(client.capture, prompts, layouts)]


def test_eight_at_once(client: Client, reference: Reference) -> None:
    prompts = [models.prompt(100 + i, n) for i, n in enumerate([7, 19, 64, 130, CHUNK, 300, 31, 2 * CHUNK + 1])]
    at_once = together(client, prompts, ["planes", "rows"] * 4)
    for got, ids in zip(at_once, prompts, strict=True):
        check(got, ids, client, reference)
        solo, _, _ = client.capture(ids)
        assert error(got, solo) < 0.02


def test_shared_prefix_and_the_same_prompt_twice(client: Client, reference: Reference) -> None:
    prefix = models.prompt(7, 200)
    prompts = [prefix + models.prompt(8, 40), prefix + models.prompt(9, 140), prefix, prefix]
    for got, ids in zip(together(client, prompts, ["planes"] * 4), prompts, strict=True):
        check(got, ids, client, reference)


def test_strangers_are_ignored_beside_captured_requests(client: Client, reference: Reference) -> None:
    server = client.server
    assert server is not None
    own, other = models.prompt(20, 150), models.prompt(21, 90)
    before = set(client.spool.iterdir())
    alone = server.generate(other)["output_ids"]
    with ThreadPoolExecutor(5) as pool:
        strangers = [pool.submit(server.generate, other) for _ in range(3)]
        unknown = pool.submit(server.generate, other, rid="hsx-nobody-laid-this-out")
        got, _, _ = pool.submit(client.capture, own).result()
        assert all(s.result()["output_ids"] == alone for s in [*strangers, unknown])
    server.get("/health_generate")
    check(got, own, client, reference)
    new = {p.name.split(".")[0] for p in set(client.spool.iterdir()) - before}
    assert new == {max(client.requests)}


def spoil(client: Client, ids: list[int], what: str) -> dict[str, Any]:
    planes = client.planes(len(ids), "planes")
    if what == "short":
        path = client.spool / "short.bin"
        path.write_bytes(bytes(100))
        return {"path": str(path)}
    changes: dict[str, dict[str, Any]] = {
        "missing": {"path": str(client.spool / "nowhere" / "x.bin")},
        "folder": {"path": str(client.spool)},
        "crc": {"ids_crc32": 1},
        "more rows": {"tokens": len(ids) - 1},
        "no tokens": {"tokens": 0},
        "planes": {"planes": planes[:-1]},
        "stride": {"planes": [{**planes[0], "row_stride": 2}, *planes[1:]]},
        "rid": {"rid": "hsx-another"},
        "type": {"tokens": "40"},
        "unknown": {"colour": "blue"},
    }
    return changes[what]


REASONS = {
    "short": "CaptureRequest.path: ", "missing": "No such file", "folder": "Is a directory", "crc": "ids_crc32 says 1",
    "more rows": "CaptureRequest.tokens says 39", "no tokens": "CaptureRequest.tokens: 0", "stride": "row_stride 2",
    "planes": "CaptureRequest.planes: 3, expected 4", "rid": "CaptureRequest.rid: 'hsx-another'",
    "type": "CaptureRequest.tokens: expected int", "unknown": "unknown field colour",
}  # fmt: skip


def test_each_error_is_a_record_and_the_server_lives(client: Client, reference: Reference, kind: str) -> None:
    if kind != "llama":
        pytest.skip("errors don't depend on the model")
    ids = models.prompt(30, 40)
    rids = {what: client.ask(ids, **spoil(client, ids, what)) for what in REASONS}
    with ThreadPoolExecutor(len(rids)) as pool:
        tokens = {tuple(a["output_ids"]) for a in pool.map(lambda rid: client.post(ids, rid), rids.values())}
    assert len(tokens) == 1, "an error in capture changed an answer"
    for what, rid in rids.items():
        record = client.record(rid)
        assert REASONS[what] in record["error"], (what, record)
        assert record["rid"] == rid
    got, _, _ = client.capture(ids)
    check(got, ids, client, reference)


def test_rows_of_an_answered_request_are_ignored(client: Client) -> None:
    ids = models.prompt(31, 33)
    rid = client.ask(ids)
    client.post(ids, rid)
    first, before = client.record(rid), client.tensor(rid)
    client.post(models.prompt(32, 33), rid)
    client.capture(ids)  # a later sample, so that anything wrong of the earlier one would be written by now
    assert client.record(rid) == first
    assert torch.equal(client.tensor(rid), before)
