"""The probe matrix against real SGLang: it passes where all is right, and names cases where the radix cache is on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import extraction_host
import pytest
import sglang_server
from capture_client import write_json
from extraction_host import CHUNK, LAYERS, Host

from hsx_host import client as client_module
from hsx_host import fingerprint, model_facts, probe
from hsx_host.errors import Refused


@contextmanager
def server_by_hand(
    root: Path, model: Path, start: Callable[..., sglang_server.Server], *, radix: bool
) -> Iterator[client_module.Engine]:
    """An extraction server that nobody checked the flags of."""
    spool = root / "spool"
    spool.mkdir()
    facts = model_facts.read_model(model)
    capture = write_json(
        spool / "capture.json", "CaptureSpec", plugin_id="test", spool=str(spool), layers=LAYERS,
        num_blocks=facts.num_blocks, hidden_size=facts.hidden_size, dtype="bfloat16", writers=2, ring_bytes=1 << 22,
        rid_prefix="hsx-",
    )  # fmt: skip
    flags: dict[str, Any] = {"plugin": True, "env": {"HSX_CAPTURE_SPEC": str(capture)}} if radix else {"spec": capture}
    server = start(model, chunk=CHUNK, **flags)
    try:
        yield client_module.Engine(server.url, spool, lambda: server.process.poll() is None)
    finally:
        server.stop()


def planned(root: Path, model: Path) -> Host:
    data = extraction_host.write_data(root / "d.jsonl", [150, 20], seed=21)
    host = Host(root, extraction_host.spec_of(root, model, data))
    host.verb("plan")
    return host


def test_all_cases_pass(tmp_path: Path, tiny_llama: Path, start_sglang: Callable[..., sglang_server.Server]) -> None:
    host = planned(tmp_path, tiny_llama)
    with server_by_hand(tmp_path, tiny_llama, start_sglang, radix=False) as engine:
        folder, meaning = fingerprint.opened(host.spec)
        report = probe.probe(host.spec, folder, meaning, engine)
    cases = {case.name: case for case in report.cases}
    assert report.ok, [case for case in report.cases if not case.ok]
    assert list(cases) == [
        *(f"length {n}" for n in (1, 19, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 150)),
        "eight at once",
        "shared prefix",
        "same prompt twice",
    ]
    for n in (1, 19, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 150):
        assert cases[f"length {n}"].text.startswith(f"{n} sent, {n} dumped, 0 cached, 4 planes, next token")
    assert not (folder / "tmp/probe").exists()
    assert not list(engine.spool.glob("hsx-*")), "the probe leaves nothing in the spool"


def test_radix_cache_is_found(
    tmp_path: Path, tiny_llama: Path, start_sglang: Callable[..., sglang_server.Server]
) -> None:
    """The plugin itself refuses to capture beside a radix cache; the probe says so before it sends anything.

    That the matrix would find it as well is shown in ``tests/unit/host/test_host_probe.py``.
    """
    host = planned(tmp_path, tiny_llama)
    with server_by_hand(tmp_path, tiny_llama, start_sglang, radix=True) as engine:
        folder, meaning = fingerprint.opened(host.spec)
        with pytest.raises(Refused, match="radix cache is on"):
            probe.probe(host.spec, folder, meaning, engine)
    assert not (folder / "tmp/probe").exists()


@pytest.mark.serial
def test_the_verb_borrows_probes_and_gives_back(tmp_path: Path, tiny_llama: Path) -> None:
    """By itself, as a person calls it: the extraction server is started for it, and production stands at the end."""
    host = planned(tmp_path, tiny_llama)
    try:
        report = host.verb("probe")
        assert report["ok"]
        state = json.loads((tmp_path / "home/state/server.json").read_text())
        assert state["mode"] == "production"
        os.kill(state["pid"], 0)
    finally:
        host.verb("acquire")
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")
