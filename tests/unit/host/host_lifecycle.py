"""What the unit tests of the host's lifecycle share: a spec for a home of their own, and a host that cleans up."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hsx_host import contract as c
from hsx_host import launch, lease, procid, serve, state
from hsx_host.guards import GuardRecord

FAKES = Path(__file__).parent / "fakes"
HOST = "127.0.0.1"


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


def make_spec(folder: Path, run_id: str = "run-1", **server: Any) -> c.RunSpec:
    """A spec whose servers are the stand-in of ``fakes/``, on a port of its own."""
    port = free_port()
    model = folder / "model"
    model.mkdir(exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8, "hidden_size": 16, "vocab_size": 512,
        "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (model / "config.json").write_text(json.dumps(config))
    (folder / "out").mkdir(exist_ok=True)
    args = ["--model-path", str(model), "--host", HOST, "--port", str(port)]
    settings = c.ServerSettings(
        args=args,
        env={"PYTHONPATH": str(FAKES), "NCCL_PROTO": "LL"},
        host=HOST,
        port=port,
        start_timeout_s=30.0,
        stop_grace_s=3.0,
        soak_requests=3,
    )
    settings = replace(settings, **server)
    extraction = replace(settings, args=[*settings.args, "--disable-radix-cache", "--disable-cuda-graph"])
    return c.RunSpec(
        run_id=run_id,
        profile="test",
        manager="process",
        host=c.HostSettings(sys.executable, str(folder / "home"), str(folder / "out"), [str(folder / "old")]),
        production=settings,
        extraction=extraction,
        model=c.ModelSettings(str(model)),
        capture=c.CaptureSettings([1, 4], ["speculators_v1"], writers=1, ring_bytes=1 << 20),
        data=c.DataSettings(str(folder / "d.jsonl"), "d", 4),
        benchmark=c.BenchmarkSettings(True, {"single": c.BenchmarkLoad(2, 8, 4, 1)}),
        cleanup=c.CleanupSettings("ask", 0),
        lease_ttl_s=60.0,
    )


def with_env(spec: c.RunSpec, mode: str, **env: str) -> c.RunSpec:
    """The spec with more environment variables for one of its servers."""
    settings = getattr(spec, mode)
    return replace(spec, **{mode: replace(settings, env=settings.env | env)})


def write_spec(spec: c.RunSpec, folder: Path, name: str = "spec.json") -> str:
    path = folder / name
    path.write_text(c.encode(spec))
    return str(path)


def verb(*argv: str, check: int = 0) -> Any:
    """Run a verb as its own process; the parsed document, after its exit code was checked."""
    done = subprocess.run([sys.executable, "-m", "hsx_host", *argv], capture_output=True, text=True, timeout=120)
    assert done.returncode == check, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def start_by_hand(
    spec: c.RunSpec, args: list[str] | None = None, env: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A server started by somebody else, as a person would; returns once it listens."""
    settings = spec.production
    child = subprocess.Popen(
        [spec.host.python, "-m", "sglang.launch_server", *(settings.args if args is None else args)],
        env={"PATH": os.environ["PATH"], "HOME": "/", "FROM_HAND": "yes", **(settings.env if env is None else env)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    wait_for(lambda: listens(settings.port) or child.poll() is not None)
    return child


def listens(port: int) -> bool:
    with socket.socket() as s:
        return s.connect_ex((HOST, port)) == 0


def wait_for(condition: Callable[[], Any], seconds: float = 60.0) -> Any:
    """Wait until something holds; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"did not come true: {condition}")


def environ(pid: int) -> dict[str, str]:
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
    return dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)


def cmdline(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]


def events(spec: c.RunSpec) -> list[str]:
    return [json.loads(line)["event"] for line in state.journal_tail(spec, 1000)]


def clean_up(spec: c.RunSpec) -> None:
    """Stop what a test left: the recorded server, the guards, by their ids."""
    with suppress(Exception):
        lease.path(spec).unlink(missing_ok=True)
    while living := living_guards(spec):
        for guard in living:
            procid.send(guard, signal.SIGKILL)
    server = serve.known(spec)
    if server is not None:
        launch.stop(spec, server, "the test is over")


def living_guards(spec: c.RunSpec) -> list[procid.ProcId]:
    """The guards on record that run."""
    record = state.read_document(GuardRecord, state.home(spec) / "state" / "guard.json")
    return [p for p in (procid.ProcId(*pair) for pair in record.processes) if procid.alive(p)] if record else []


def live_lease(spec: c.RunSpec) -> c.Lease:
    """The lease alone; a transition away from production starts its guard."""
    return lease.acquire(spec)


def two_guards(spec: c.RunSpec) -> list[procid.ProcId]:
    return wait_for(lambda: (g := living_guards(spec)) and len(g) == 2 and g)


def kill(*procs: procid.ProcId) -> None:
    for p in procs:
        procid.send(p, signal.SIGKILL)
    wait_for(lambda: not any(procid.alive(p) for p in procs))


def is_given_back(spec: c.RunSpec) -> bool:
    return serve.mode_now(spec) == "production" and lease.read(spec) is None


def verbless_mode(spec: c.RunSpec) -> str:
    """The mode on record, "stopped" where the server does not live."""
    server = state.read_server(spec)
    if server is None or server.phase == "stopped" or not procid.alive(procid.ProcId(server.pid, server.start)):
        return "stopped"
    return server.mode if server.phase == "running" else "starting"
