"""The probe matrix against servers with one fault each, in a stand-in: every kind is found by a case, with numbers."""

from __future__ import annotations

import threading
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest
import torch
from host_stand_in import StandIn
from safetensors.torch import save_file

from hsx_host import contract as c
from hsx_host import fingerprint, plan, probe, proof, state
from hsx_host.errors import Refused, TryAgain
from hsx_host.spool import CaptureRecord, PluginReady

READY = PluginReady("p", 1, 0, "0.5.23", "LlamaForCausalLM", [1, 3, 6], h.BLOCKS, h.HIDDEN, "RMSNorm", 1e-5, {})


def rows(ids: list[int]) -> list[Any]:
    """States as a causal model has them: row r depends on the ids up to r, and on nothing else."""
    table = [torch.randn(h.VOCAB, h.HIDDEN, generator=torch.Generator().manual_seed(s)) for s in range(len(h.PLANES))]
    return [(0.5 * t[ids].cumsum(0) + t[ids]).bfloat16() for t in table]


class Setting:
    """A planned data set, and the stand-in as a right server."""

    def __init__(self, root: Path) -> None:
        self.spec = h.make_spec(root, h.write_lines(root / "d.jsonl", h.samples(6)))
        plan.run(self.spec, Namespace(dry_run=False, failed=False))
        (root / "spool").mkdir()
        self.server = StandIn(root / "spool")
        self.server.states = rows
        state.write_document(root / "spool/ready-1.json", READY)
        weight = {"weight": torch.randn(h.HIDDEN).exp().bfloat16(), "eps": torch.tensor([1e-5], dtype=torch.float64)}
        save_file(weight, root / "spool" / proof.NORM_FILE)
        prover = proof.NextToken(self.spec.model.path, root / "spool" / proof.NORM_FILE)
        head = torch.from_numpy(prover.head.rows(0, prover.head.shape[0]))
        self.normed = prover.normed
        self.server.next_token = lambda last: int((head @ prover.normed(last).float()).argmax())

    def probe(self) -> tuple[c.ProbeReport, dict[str, str]]:
        """The report, and the failed cases' texts."""
        dataset, meaning = fingerprint.opened(self.spec)
        report = probe.probe(self.spec, dataset, meaning, self.server.engine())
        assert not (dataset / "tmp/probe").exists()
        assert [p.name for p in self.server.spool.glob("hsx-*")] == []
        return report, {case.name: case.text for case in report.cases if not case.ok}


@pytest.fixture
def setting(tmp_path: Path) -> Iterator[Setting]:
    made = Setting(tmp_path)
    yield made
    made.server.close()


def test_a_right_server_passes_with_numbers(setting: Setting) -> None:
    report, failed = setting.probe()
    assert (report.ok, failed) == (True, {})
    texts = {case.name: case.text for case in report.cases}
    assert [n for n in texts if n.startswith("length")] == [f"length {n}" for n in (1, 10, 19, 63, 64, 65, 129)]
    assert texts["length 19"].startswith("19 sent, 19 dumped, 0 cached, 4 planes, next token")


def test_a_prefix_cache(setting: Setting) -> None:
    """What SGLang's radix cache does: known prefixes never go through the model, so the plugin sees no rows of them."""
    seen: list[list[int]] = []
    asked: list[list[int]] = []
    setting.server.states = lambda ids: asked.append(ids) or rows(ids)  # type: ignore[func-returns-value]

    def cache(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord]:
        ids = asked[-1]
        known = max((common(ids, old) for old in seen), default=0)
        known = min(known, len(ids) - 1)
        seen.append(ids)
        if not known:
            return answer, record
        why = f"a chunk starts at row {known}, expected row 0; its prefix came from a cache"
        return {**answer, "meta_info": {**answer["meta_info"], "cached_tokens": known}}, replace(
            record, rows=0, error=why
        )

    setting.server.change = cache
    _, failed = setting.probe()
    assert {"shared prefix", "same prompt twice"} <= set(failed)
    assert failed["same prompt twice"].startswith("64 sent, 0 dumped, 63 cached")
    assert not {"length 63", "length 64", "length 129"} & set(failed)


def common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def test_chunked_prefill_that_keeps_the_last_chunk_only(setting: Setting) -> None:
    def cut(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord]:
        return answer, replace(record, rows=(record.rows - 1) % 64 + 1)

    setting.server.change = cut
    _, failed = setting.probe()
    assert set(failed) == {"length 65", "length 129"}
    assert failed["length 65"].startswith("65 sent, 1 dumped, 0 cached")


def test_rows_of_another_request_in_a_batch(setting: Setting) -> None:
    """Two requests in flight at once get each other's layers, as large as their own prompts."""
    lock, flying = threading.Lock(), [0]

    def mixed(ids: list[int]) -> list[Any]:
        with lock:
            flying[0] += 1
        try:
            import time

            time.sleep(0.05)
            planes = rows(ids)
            if flying[0] > 1:
                planes[1] = rows([(i + 1) % h.VOCAB for i in ids])[1]
            return planes
        finally:
            with lock:
                flying[0] -= 1

    setting.server.states = mixed
    _, failed = setting.probe()
    assert "eight at once" in failed
    assert "layer_3 is off by" in failed["eight at once"]
    assert not [name for name in failed if name.startswith("length")]


def test_a_single_wrong_row(setting: Setting) -> None:
    """One row of the second run is another token's: the bound is tight enough for one in 64."""
    count = [0]

    def once(ids: list[int]) -> list[Any]:
        planes = rows(ids)
        if len(ids) == 64:
            count[0] += 1
            if count[0] == 3:  # after "length 64": the second of "same prompt twice"
                planes[2][40] = -planes[2][40]
        return planes

    setting.server.states = once
    _, failed = setting.probe()
    assert list(failed) == ["same prompt twice"]
    assert "layer_6 is off by" in failed["same prompt twice"]


def test_final_after_the_norm(setting: Setting) -> None:
    """The server's token follows from the right state; what was captured is one norm further on."""
    right = setting.server.next_token
    true = {}

    def normed(ids: list[int]) -> list[Any]:
        planes = rows(ids)
        final = setting.normed(planes[-1])
        true[final[-1].float().sum().item()] = planes[-1][-1]
        return [*planes[:-1], final]

    setting.server.states = normed
    setting.server.next_token = lambda last: right(true[last.float().sum().item()])
    _, failed = setting.probe()
    assert len(failed) >= 3
    assert all("head(norm(final)) gives token" in text for text in failed.values())


def test_not_finite(setting: Setting) -> None:
    def nan(answer: dict[str, Any], record: CaptureRecord) -> tuple[dict[str, Any], CaptureRecord]:
        return answer, replace(record, planes=[replace(p, finite=False) for p in record.planes])

    setting.server.change = nan
    report, failed = setting.probe()
    assert len(failed) == len(report.cases)
    assert "layer_1 is not finite" in failed["length 1"]


def test_a_plugin_that_captures_nothing_says_why(setting: Setting) -> None:
    state.write_document(setting.server.spool / "ready-1.json", replace(READY, error="RuntimeError: the seam is gone"))
    with h.refuses(Refused, "capture plugin", "the seam is gone"):
        setting.probe()
    (setting.server.spool / "ready-1.json").unlink()
    with h.refuses(TryAgain, "capture plugin", "no scheduler"):
        setting.probe()


def test_a_server_that_dies(setting: Setting) -> None:
    setting.server.close()
    with h.refuses(TryAgain, "extraction", "server is gone"):
        setting.probe()
