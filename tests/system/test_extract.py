"""Extraction against real SGLang on the CPU: every value against Hugging Face, and every way to be interrupted."""

from __future__ import annotations

import gzip
import json
import os
import signal
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import extraction_host
import faulty_sets
import models
import numpy as np
import pytest
import sglang_server
import torch
from extraction_host import LAYERS, Host
from reference import Reference

NEAR, FAR = 0.05, 0.15  # relative error of bf16 through eight loud random blocks; another layer is off by 0.3 and more
LENGTHS = [
    1,
    2,
    19,
    63,
    64,
    65,
    128,
    129,
    200,
    33,
    7,
    90,
    300,
    16,
    48,
    5,
    11,
    77,
    150,
    40,
    61,
    70,
    3,
    24,
    99,
    130,
    8,
    55,
]


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Iterator[Host]:
    """A host that is in extraction mode for all tests of this module."""
    root = tmp_path_factory.mktemp("host")
    spec = extraction_host.spec_of(root, tiny_llama, extraction_host.write_data(root / "warm.jsonl", [4]))
    host = Host(root, spec)
    host.verb("acquire")
    host.verb("serve", "extraction")
    try:
        yield host
    finally:
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")


@pytest.fixture(scope="module")
def extracted(host: Host) -> Host:
    """A data set of one shard, planned and extracted."""
    made = host.with_data(extraction_host.write_data(host.root / "whole.jsonl.gz", LENGTHS), shard_size=32)
    made.verb("plan")
    made.summary = made.verb("extract", "--shard", "0")  # type: ignore[attr-defined]
    return made


def load(path: Path) -> dict[str, Any]:
    body: dict[str, Any] = torch.load(path, mmap=True, weights_only=True)
    return body


def test_every_sample_equals_hugging_face(extracted: Host, tiny_llama: Path) -> None:
    reference = Reference(tiny_llama)
    lines = extracted.manifest()
    assert sorted(lines) == list(range(len(LENGTHS)))
    for row, length in enumerate(LENGTHS):
        body = load(extracted.dataset / lines[row]["file"])
        layers, final = reference.states(body["input_ids"])
        assert len(body["input_ids"]) == length
        for k, plane in zip(LAYERS, body["hidden_states"][:-1], strict=True):
            assert reference.off(plane, layers[k]) < NEAR, (row, k)
            assert reference.off(plane, layers[k - 1]) > FAR, (row, k)  # the bound above tells neighbours apart
        assert reference.off(body["hidden_states"][-1], final) < NEAR, row


def test_ids_and_masks_are_the_data_files_own(extracted: Host) -> None:
    lines = gzip.decompress(Path(extracted.spec.data.path).read_bytes()).splitlines()
    for row, line in enumerate(lines):
        wanted, body = json.loads(line), load(extracted.dataset / f"v1/data_{row}.pt")
        assert body["input_ids"].tolist() == wanted["input_ids"]
        assert body["loss_mask"].tolist() == wanted["loss_mask"]


def test_files_are_whole_zips_and_nothing_else_is_left(extracted: Host) -> None:
    for row in range(len(LENGTHS)):
        with zipfile.ZipFile(extracted.dataset / f"v1/data_{row}.pt") as archive:
            assert archive.testzip() is None
    assert not list((extracted.dataset / "tmp").rglob("*.part"))
    spool = [p.name for p in Path(extracted.spec.host.home, "spool").rglob("hsx-*")]
    assert spool == []


def test_summary_plan_and_files_agree(extracted: Host) -> None:
    summary = extracted.summary  # type: ignore[attr-defined]
    plan = json.loads((extracted.dataset / "plan.json").read_text())
    sizes = sum(p.stat().st_size for p in (extracted.dataset / "v1").glob("*.pt"))
    assert (summary["published"], summary["failed"], summary["tokens"]) == (len(LENGTHS), 0, sum(LENGTHS))
    assert summary["bytes"] == sizes == plan["todo_bytes"]
    assert summary["name"] == plan["shards"][0]["name"] == f"shard 00000 rows 0-{len(LENGTHS) - 1}"
    assert summary["proof"].startswith("4 of 4 next tokens")


def test_verify_handoff_convert(extracted: Host, tmp_path: Path, tiny_llama: Path) -> None:
    report = extracted.verb("verify", "--deep", "--reference", "4")
    assert (report["ok"], report["samples"], report["missing"], report["proved"]) == (True, len(LENGTHS), 0, 4)
    handoff = extracted.verb("handoff")
    assert handoff["samples"] == len(LENGTHS)
    assert handoff["layer_ids"]["vllm"] == LAYERS
    assert handoff["layer_ids"]["specforge"] == [k - 1 for k in LAYERS]
    lengths = json.loads((extracted.dataset / "v1/sample_lengths.json").read_text())
    assert lengths == {str(i): n for i, n in enumerate(LENGTHS)}
    result = extracted.verb("convert", "--format", "specforge", "--out", str(tmp_path / "sf"), "--limit", "5")
    assert result["formats"][0]["samples"] == 5
    body = torch.load(tmp_path / "sf/rows_0-2000/data_3.ckpt", weights_only=True)
    source = load(extracted.dataset / "v1/data_3.pt")
    assert body["aux_hidden_state"].shape == (1, LENGTHS[3], 3 * source["hidden_states"][0].shape[1])
    after = Reference(tiny_llama).normed(source["input_ids"])
    assert Reference.off(body["hidden_state"][0], after) < NEAR


@pytest.mark.parametrize("fault", faulty_sets.TEXT)
def test_verify_names_the_fault_of_a_wrong_extraction(extracted: Host, tmp_path: Path, fault: str) -> None:
    faulty_sets.damage(tmp_path / "output", fault, extracted.spec)
    host = replace(extracted.spec.host, home=str(tmp_path / "home"), output_root=str(tmp_path / "output"))
    wrong = Host(tmp_path, replace(extracted.spec, host=host))
    assert faulty_sets.NAMED[fault] in wrong.verb("verify", "--deep", "--reference", "4", code=3)["message"]


def test_again_does_nothing_and_a_cut_file_is_redone(extracted: Host) -> None:
    before = extracted.manifest()
    assert extracted.verb("extract", "--shard", "0")["extracted"] == 0
    cut = extracted.dataset / before[12]["file"]
    whole = load(cut)["hidden_states"]
    kept = [t.clone() for t in whole]
    del whole
    os.truncate(cut, 1000)
    assert extracted.verb("verify", code=3)["message"].count("1000 bytes") == 1
    assert extracted.verb("plan")["todo"] == 1
    assert extracted.verb("extract", "--shard", "0")["extracted"] == 1
    after = extracted.manifest()
    assert {r: d["rid"] for r, d in after.items() if r != 12} == {r: d["rid"] for r, d in before.items() if r != 12}
    assert all(Reference.off(a, b) < NEAR for a, b in zip(load(cut)["hidden_states"], kept, strict=True))


def test_strangers_during_an_extraction_are_ignored_and_not_disturbed(host: Host, tiny_llama: Path) -> None:
    """Others use the same server all the while: their tokens are the model's, and no row of theirs gets in."""
    lengths = [100 + 3 * i for i in range(24)]
    made = host.with_data(
        extraction_host.write_data(host.root / "company.jsonl", lengths, 8), shard_size=64, concurrency=4
    )
    made.verb("plan")
    state, reference = json.loads(Path(made.spec.host.home, "state/server.json").read_text()), Reference(tiny_llama)
    server = sglang_server.Server(None, made.spec.extraction.port, Path(state["log"]))  # type: ignore[arg-type]
    prompts = [models.prompt(900 + i, 20 + 30 * i) for i in range(4)]
    logits = [reference.next_logits(torch.tensor(ids)) for ids in prompts]
    client = made.start("extract", "--shard", "0")
    told: list[tuple[int, int]] = []
    with ThreadPoolExecutor(len(prompts)) as pool:
        while client.poll() is None:
            asked = [pool.submit(server.generate, ids) for ids in prompts]
            told += [(i, a.result()["output_ids"][0]) for i, a in enumerate(asked)]
    out, err = client.communicate()
    assert client.returncode == 0, err[-2000:]
    assert (json.loads(out)["published"], json.loads(out)["failed"]) == (len(lengths), 0)
    assert len(told) >= len(prompts)
    for i, token in told:  # the most likely one, up to what a batch's company does to bf16
        assert logits[i][token] >= logits[i].max() - 2**-5 * logits[i].abs().max(), (i, token)
    for line in list(made.manifest().values())[::6]:
        body = load(made.dataset / line["file"])
        layers, final = reference.states(body["input_ids"])
        for plane, want in zip(body["hidden_states"], [*(layers[k] for k in LAYERS), final], strict=True):
            assert reference.off(plane, want) < NEAR, line["index"]
    assert made.verb("verify", "--deep")["ok"]


def test_client_killed_in_the_middle_then_resumed(host: Host) -> None:
    lengths = [120 + i for i in range(40)]
    made = host.with_data(
        extraction_host.write_data(host.root / "killed.jsonl", lengths, 3), shard_size=64, concurrency=4
    )
    made.verb("plan")
    client = made.start("extract", "--shard", "0")
    wait_for(lambda: 3 <= len(made.manifest()) < 30, client)
    os.kill(client.pid, signal.SIGKILL)
    client.communicate()
    before = made.manifest()
    assert 0 < len(before) < len(lengths)
    assert made.verb("extract", "--shard", "0")["extracted"] == len(lengths) - len(before)
    after = made.manifest()
    assert sorted(after) == list(range(len(lengths)))
    assert all(after[r] == d for r, d in before.items()), "a published sample was extracted again"
    assert not list((made.dataset / "tmp").rglob("*.part"))
    assert made.verb("verify", "--deep")["ok"]


def test_sigterm_keeps_what_is_published(host: Host) -> None:
    lengths = [150] * 30
    made = host.with_data(
        extraction_host.write_data(host.root / "stopped.jsonl", lengths, 4), shard_size=64, concurrency=4
    )
    made.verb("plan")
    client = made.start("extract", "--shard", "0")
    wait_for(lambda: 2 <= len(made.manifest()) < 25, client)
    client.send_signal(signal.SIGTERM)
    out, _ = client.communicate(timeout=120)
    assert client.returncode == 75
    assert json.loads(out)["kind"] == "again"
    assert not list((made.dataset / "tmp").rglob("*.part"))
    before = made.manifest()
    assert made.verb("extract", "--shard", "0")["extracted"] == len(lengths) - len(before)


def test_two_at_once_never_both_act(host: Host) -> None:
    made = host.with_data(extraction_host.write_data(host.root / "twice.jsonl", [200] * 12, 5), concurrency=2)
    made.verb("plan")
    first = made.start("extract", "--shard", "0")
    wait_for(lambda: len(made.manifest()) >= 1, first)
    first.send_signal(signal.SIGSTOP)  # else it may be done before the second has begun
    said = made.verb("extract", "--shard", "0", code=75)
    first.send_signal(signal.SIGCONT)
    assert "shard 00000" in said["message"]
    out, _ = first.communicate(timeout=120)
    assert (first.returncode, json.loads(out)["extracted"]) == (0, 12)


def test_a_failing_sample_stands_in_the_ledger(host: Host) -> None:
    """A sample that the server refuses: longer than its context, put into the shard behind plan's back."""
    from hsx_host.dataset import Sample, identity
    from hsx_host.shards import ShardFiles, pack, read_input, write_input

    made = host.with_data(extraction_host.write_data(host.root / "poisoned.jsonl", [20] * 6, 6))
    made.verb("plan")
    files = ShardFiles(made.dataset, 0)
    good = read_input(files)
    samples = [good.sample(i) for i in range(6)]
    ids, mask = np.full(3000, 9, np.int32), np.ones(3000, np.uint8)
    samples[3] = Sample(3, ids, mask, identity(ids, mask))
    write_input(files.input, pack(samples))
    said = made.verb("extract", "--shard", "0", code=75)
    assert "1 of 6 samples" in said["message"]
    assert "row 3 after" in said["message"]
    assert sorted(made.manifest()) == [0, 1, 2, 4, 5]
    failed = [json.loads(line) for line in files.failures.read_text().splitlines()]
    assert [f["index"] for f in failed] == [3]
    assert "3000" in failed[0]["reason"], "the server's own words are not in the ledger"
    assert made.verb("verify", code=75)["message"].count("failed rows: 3") == 1
    assert made.verb("handoff", code=3)["kind"] == "refused"
    write_input(files.input, good)
    assert made.verb("extract", "--shard", "0")["extracted"] == 1
    assert files.failures.read_text() == ""


def test_killed_server_ends_the_shard_at_once(host: Host) -> None:
    """Last in this module: it takes the server away. Another call brings it back and does only what is missing."""
    lengths = [180] * 40
    made = host.with_data(
        extraction_host.write_data(host.root / "dead.jsonl", lengths, 7), shard_size=64, concurrency=4
    )
    made.verb("plan")
    client = made.start("extract", "--shard", "0")
    wait_for(lambda: 2 <= len(made.manifest()) < 30, client)
    state = json.loads(Path(made.spec.host.home, "state/server.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)
    out, err = client.communicate(timeout=120)
    assert client.returncode == 75, err[-2000:]
    assert "server is gone" in json.loads(out)["message"]
    before = made.manifest()
    assert 0 < len(before) < len(lengths)
    failures = made.dataset / "shards/00000/failures.jsonl"
    assert failures.read_text() == "", "a dead server cost samples their tries"
    assert made.verb("extract", "--shard", "0")["extracted"] == len(lengths) - len(before)
    assert made.verb("verify")["ok"]


def wait_for(true: Callable[[], bool], process: Any) -> None:
    """Poll until something holds; fails where the process ends before."""
    while not true():
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
