"""The host's lifecycle with real SGLang on the CPU: production, extraction with the capture plugin, and back.

One home and one production server for the module; the tests run in their order, each leaves production up.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sglang_server

from hsx_host import borrow, launch, lease, patch, procid, serve, state
from hsx_host import contract as c
from hsx_host.errors import Refused

LAYERS = [2, 4, 7]


@pytest.fixture(scope="module")
def spec(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[c.RunSpec]:
    folder = tmp_path_factory.mktemp("lifecycle")
    port = sglang_server.free_port()
    args = ["--model-path", str(tiny_llama), *sglang_server.FLAGS, "--chunked-prefill-size", "256"]
    args += ["--host", "127.0.0.1", "--port", str(port)]
    env = {"PYTHONPATH": str(sglang_server.CPU), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    production = c.ServerSettings(
        args=args, env=env, host="127.0.0.1", port=port, start_timeout_s=600, stop_grace_s=20, soak_requests=4
    )
    spec = c.RunSpec(
        run_id="lifecycle",
        profile="test",
        manager="process",
        host=c.HostSettings(sys.executable, str(folder / "home"), str(folder / "out"), []),
        production=production,
        extraction=replace(production, args=[*args, "--disable-radix-cache"]),
        model=c.ModelSettings(str(tiny_llama)),
        capture=c.CaptureSettings(LAYERS, ["speculators_v1"], writers=1, ring_bytes=1 << 24),
        data=c.DataSettings("/none", "none", 4),
        benchmark=c.BenchmarkSettings(True, {"single": c.BenchmarkLoad(2, 16, 8, 1)}),
        cleanup=c.CleanupSettings(),
        lease_ttl_s=600,
    )
    yield spec
    server = serve.known(spec)
    if server is not None:
        launch.stop(spec, server, "the tests are over")
    lease.release(spec)


@pytest.fixture(scope="module")
def spec_file(spec: c.RunSpec, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("spec") / "spec.json"
    path.write_text(c.encode(spec))
    return str(path)


@pytest.fixture(scope="module")
def by_hand(spec: c.RunSpec, tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    """Production as somebody else started it, before hsx came."""
    log = tmp_path_factory.mktemp("hand") / "server.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *spec.production.args],
            env={
                "PATH": os.environ["PATH"],
                "HOME": os.environ.get("HOME", "/"),
                "LANG": "C.UTF-8",
                **spec.production.env,
            },
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    server = sglang_server.Server(process, spec.production.port, log)
    sglang_server.wait_healthy(server, 300)
    yield process
    server.stop()


def verb(*argv: str, code: int = 0) -> dict[str, Any]:
    done = subprocess.run([sys.executable, "-m", "hsx_host", *argv], capture_output=True, text=True, timeout=500)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr[-3000:])
    return json.loads(done.stdout)


def tokens(spec: c.RunSpec) -> list[int]:
    body = {
        "input_ids": [5, 6, 7, 8, 9],
        "sampling_params": {"max_new_tokens": 8, "temperature": 0, "ignore_eos": True},
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{spec.production.port}/generate",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["output_ids"]


def launched(pid: int) -> tuple[list[str], dict[str, str], str]:
    """Arguments, environment and folder of a process."""
    read: Callable[[str], list[str]] = lambda name: Path(f"/proc/{pid}/{name}").read_text().split("\0")[:-1]  # noqa: E731
    return read("cmdline"), dict(x.split("=", 1) for x in read("environ")), os.readlink(f"/proc/{pid}/cwd")


def members(spec: c.RunSpec) -> list[procid.ProcId]:
    server = state.read_server(spec)
    assert server is not None
    return [procid.ProcId(*pair) for pair in server.tree]


def test_production_is_borrowed_and_comes_back_as_it_was(
    spec: c.RunSpec, spec_file: str, by_hand: subprocess.Popen[bytes]
) -> None:
    before, said = launched(by_hand.pid), tokens(spec)
    assert verb("preflight", "--spec", spec_file)["production_healthy"] is True
    assert verb("serve", "production", "--spec", spec_file)["changed"] is False
    assert verb("benchmark", "--label", "before", "--spec", spec_file)["loads"]["single"]["output_tok_s"] > 0

    verb("acquire", "--spec", spec_file)
    extraction = verb("serve", "extraction", "--spec", spec_file)
    assert by_hand.poll() is not None
    report = verb("patch", "verify", "--spec", spec_file)
    assert report["pristine"] is True
    assert report["files_checked"] > 1000
    assert report["seams"]
    assert report["plugin_id"] == extraction["plugin_id"]
    ready = [json.loads(p.read_text()) for p in serve.extraction_spool(spec).glob("ready-*.json")]
    assert [r["layers_to_capture"] for r in ready] == [LAYERS]
    assert tokens(spec) == said  # the plugin changes nothing that is generated
    assert verb("serve", "extraction", "--spec", spec_file)["changed"] is False
    ours = members(spec)
    assert len(ours) >= 3  # main, scheduler, detokenizer

    back = verb("restore", "--spec", spec_file)
    assert (back["changed"], back["pristine"], back["problems"]) == (True, True, [])
    assert back["files_checked"] > 1000
    assert not any(procid.alive(p) for p in ours)
    assert launched(back["pid"]) == before
    frozen = [Path(log).read_text().count('"POST /freeze_gc HTTP/1.1" 200') for log in (extraction["log"], back["log"])]
    assert frozen[0] == frozen[1] + 1  # newer versions do it themselves as well, in any mode
    assert tokens(spec) == said
    assert verb("patch", "revert", "--spec", spec_file)["pristine"] is True
    assert not Path(spec.host.home, "plugin").exists()
    assert verb("status", "--health", "--spec", spec_file)["in_the_way"] == []
    assert lease.read(spec) is None
    for proc in members(spec):
        assert "hsx_capture" not in Path(f"/proc/{proc.pid}/maps").read_text()
        assert "HSX_CAPTURE_SPEC" not in Path(f"/proc/{proc.pid}/environ").read_text()
    after = verb("benchmark", "--label", "after", "--spec", spec_file)
    assert "of the baseline" in after["text"]
    assert after["ratios"]["single"] > 0


def test_another_profile_than_what_runs_is_refused(spec: c.RunSpec, tmp_path: Path) -> None:
    """The same running server, looked at by a home that does not know it, under a profile with another flag."""
    other = replace(
        spec,
        host=replace(spec.host, home=str(tmp_path / "home")),
        production=replace(spec.production, args=[*spec.production.args, "--max-running-requests", "7"]),
    )
    with pytest.raises(Refused, match="--max-running-requests: runs with nothing, the profile says '7'"):
        serve.ensure(other, "production")
    assert tokens(spec)


def test_a_killed_extraction_server_leaves_nothing_in_the_way_of_production(spec: c.RunSpec) -> None:
    ours = []
    with contextlib.suppress(ConnectionError), borrow.extraction_server(spec) as facts:
        ours = members(spec)
        os.kill(facts.pid, signal.SIGKILL)
        while procid.start_ticks(facts.pid):
            time.sleep(0.1)
        raise ConnectionError("the server is gone")
    assert len(ours) >= 3
    assert not any(procid.alive(p) for p in ours)
    assert tokens(spec)
    assert lease.read(spec) is None
    assert patch.source_id()
    assert serve.ensure(spec, "production").changed is False


def test_a_stranger_on_the_port_is_left_alone(spec: c.RunSpec) -> None:
    lease.acquire(spec)
    serve.ensure(spec, "stopped")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("127.0.0.1", spec.production.port))
        s.listen()
        for mode in ("production", "extraction"):
            with pytest.raises(Refused, match=f"stranger: pid {os.getpid()}"):
                serve.ensure(spec, mode)
    lease.release(spec)
