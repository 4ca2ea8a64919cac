"""Borrowing a GPU and giving it back, with the real nvidia-smi and real device memory: one JSON line a step.

  production   a server that its owner started: which processes hold how much of the device
  stranger     somebody else's process takes 1 GiB of the same device
  stopped      acquire, serve stopped: all of the server's memory is free, the stranger is named and lives
  extraction   serve extraction; then kill -9 of its main process: a child lives on, ignores SIGTERM and holds memory
  restored     restore: that child is found by the record and ended; seconds until production gives a token
Exit 1 where one of these does not hold. ``--cpu`` runs the same steps without a device: what memory says is left out.

Usage: python bench/gpu_borrow.py --work /tmp/hsx-borrow
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "include"), str(ROOT / "tests" / "system"), str(ROOT / "bench")]

import psutil  # noqa: E402

from hsx_host import contract as c  # noqa: E402
from hsx_host import devices, health, state  # noqa: E402

HELD_MIB = 1024
HOLDER = """import sys, time
if mib := int(sys.argv[1]):
    import torch
    held = torch.zeros(mib << 20, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
print("up", flush=True)
time.sleep(86400)"""


@dataclass
class Bench:
    """One host: its spec, and what was found wrong."""

    work: Path
    cpu: bool
    spec: c.RunSpec
    wrong: list[str]

    def verb(self, *words: str) -> tuple[float, str]:
        """Run a verb of the host program; seconds and its log."""
        path = self.work / "spec.json"
        path.write_text(c.encode(self.spec))
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'include'}:{os.environ.get('PYTHONPATH', '')}"}
        began = time.monotonic()
        command = [sys.executable, "-m", "hsx_host", *words, "--spec", str(path)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stdout}\n{done.stderr[-3000:]}")
        return time.monotonic() - began, done.stderr

    def held(self, pids: set[int]) -> int:
        """MiB that the driver counts for these processes."""
        return sum(u.mebibytes for u in devices.compute_apps() if u.pid in pids)

    def tell(self, step: str, **facts: Any) -> None:
        print(json.dumps({"step": step, **facts}), flush=True)

    def want(self, holds: bool, what: str) -> None:
        if not holds:
            self.wrong.append(what)
            self.tell("WRONG", what=what)


def main() -> int:
    """All steps once; 1 where something did not hold."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--cpu", action="store_true", help="no device: the steps alone")
    p.add_argument("--server-args", default="", help="more flags for both servers, separated by spaces")
    args = p.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    bench = Bench(args.work, args.cpu, make_spec(args.work, args.cpu, args.server_args.split()), [])
    children: list[subprocess.Popen[bytes]] = []
    try:
        run(bench, children)
    finally:
        for child in children:
            child.kill()
        subprocess.run(
            [sys.executable, "-m", "hsx_host", "restore", "--now", "--spec", str(args.work / "spec.json")],
            env=os.environ | {"PYTHONPATH": str(ROOT / "include")}, capture_output=True, check=False,
        )  # fmt: skip
        if server := state.read_server(bench.spec):
            tree = family(server.pid)
            for pid in tree:
                psutil.Process(pid).kill()
    bench.tell("end", held=not bench.wrong, wrong=bench.wrong)
    return 1 if bench.wrong else 0


def run(bench: Bench, children: list[subprocess.Popen[bytes]]) -> None:
    """The story."""
    settings = bench.spec.production
    owner = start_production(bench)
    children.append(owner)
    mine = family(owner.pid)
    before = bench.held(mine)
    bench.tell("production", pids=sorted(mine), mib=before, apps=apps())
    bench.want(bench.cpu or before > 0, "nvidia-smi counts no memory for the server: other pids than this machine's?")

    command = [sys.executable, "-c", HOLDER, "0" if bench.cpu else str(HELD_MIB)]
    stranger = subprocess.Popen(command, stdout=subprocess.PIPE, start_new_session=True)
    children.append(stranger)
    assert stranger.stdout is not None
    stranger.stdout.readline()
    bench.tell("stranger", pid=stranger.pid, mib=bench.held({stranger.pid}))

    bench.verb("acquire")
    seconds, log = bench.verb("serve", "stopped")
    owner.wait()
    left = bench.held(mine)
    bench.tell("stopped", seconds=round(seconds, 1), mib=left, apps=apps(), says=lines(log, "device memory"))
    bench.want(left == 0, f"{left} MiB of the stopped server are still held")
    bench.want(stranger.poll() is None, "the stranger's process was ended")
    bench.want(bench.cpu or f"pid {stranger.pid}" in log, "who else holds memory was not named")

    bench.spec = replace(bench.spec, extraction=replace(bench.spec.extraction, env=orphan_env(bench)))
    seconds, _ = bench.verb("serve", "extraction")
    server = state.read_server(bench.spec)
    assert server is not None
    tree = family(server.pid)
    bench.tell("extraction", seconds=round(seconds, 1), pids=sorted(tree), mib=bench.held(tree))
    os.kill(server.pid, signal.SIGKILL)
    time.sleep(5)  # SGLang's own schedulers end with their parent in this time
    orphans = {pid for pid in tree if psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie"}
    bench.tell("killed", reparented=sorted(orphans), mib=bench.held(orphans))
    bench.want(bool(orphans), "nothing outlived the main process: there is nothing to show")

    seconds, log = bench.verb("restore")
    alive = sorted(pid for pid in orphans if psutil.pid_exists(pid))
    back = state.read_server(bench.spec)
    assert back is not None
    bench.tell("restored", seconds=round(seconds, 1), pid=back.pid, mib=bench.held(family(back.pid)), apps=apps())
    bench.want(not alive, f"reparented processes of the server live on: {alive}")
    bench.want(bench.held(tree) == 0, "memory of the killed server is still held")
    bench.want(stranger.poll() is None, "the stranger's process was ended")
    bench.want(not health.problem(settings), "production does not serve")


def make_spec(work: Path, cpu: bool, more_flags: list[str]) -> c.RunSpec:
    """A small random model, production and extraction on one port."""
    import sglang_server

    if cpu:
        import models

        model, flags = models.build("llama", work / "model"), [*sglang_server.FLAGS, "--chunked-prefill-size", "256"]
        env = {"PYTHONPATH": str(sglang_server.CPU), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        env |= sglang_server.ranks(more_flags)
    else:
        import gpu_exact
        import gpu_servers

        model = gpu_exact.build("qwen3", work / "model")
        flags = [*gpu_servers.GPU_FLAGS, "--mem-fraction-static", "0.5"]
        env = {k: v for k, v in os.environ.items() if k.startswith(gpu_servers.INHERITED)}
    port = sglang_server.free_port()
    args = ["--model-path", str(model), *flags, *more_flags, "--host", "127.0.0.1", "--port", str(port)]
    server = c.ServerSettings(args, env, "127.0.0.1", port, start_timeout_s=400, stop_grace_s=20, soak_requests=8)
    more = [f for f in ("--disable-radix-cache", "--disable-cuda-graph") if f not in args]
    return c.RunSpec(
        run_id="borrow",
        profile="bench-borrow",
        manager="process",
        host=c.HostSettings(sys.executable, str(work / "home"), str(work / "out")),
        production=server,
        extraction=replace(server, args=[*args, *more]),
        model=c.ModelSettings(str(model)),
        capture=c.CaptureSettings([1, 3, 5], ["speculators_v1"], writers=1, ring_bytes=1 << 24),
        data=c.DataSettings("/none", "none", 4),
        benchmark=c.BenchmarkSettings(False, {}),
        cleanup=c.CleanupSettings("never", 0),
        lease_ttl_s=900,
    )


def orphan_env(bench: Bench) -> dict[str, str]:
    """The extraction server's environment, in which it gets the child that outlives it."""
    env = bench.spec.extraction.env
    path = ":".join(p for p in (str(ROOT / "bench" / "orphan"), env.get("PYTHONPATH", "")) if p)
    return env | {"PYTHONPATH": path, "BENCH_ORPHAN_MIB": "0" if bench.cpu else str(HELD_MIB)}


def start_production(bench: Bench) -> subprocess.Popen[bytes]:
    """As its owner would, not through hsx; returns once it has given a token."""
    settings = bench.spec.production
    base = {k: v for k, v in os.environ.items() if k in ("PATH", "HOME", "LANG") or k.startswith(("CUDA", "NVIDIA"))}
    with (bench.work / "production.log").open("wb") as log:
        owner = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *settings.args],
            env=base | settings.env, cwd=bench.work, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            start_new_session=True,
        )  # fmt: skip
    health.wait_until_ready(
        settings,
        alive=lambda: owner.poll() is None,
        log_file=str(bench.work / "production.log"),
        deadline_s=400,
        what="production",
    )
    return owner


def family(pid: int) -> set[int]:
    """A process and everything below it."""
    try:
        return {pid, *(p.pid for p in psutil.Process(pid).children(recursive=True))}
    except psutil.NoSuchProcess:
        return set()


def apps() -> list[str]:
    """What the driver says of all processes."""
    return [f"pid {u.pid}: {u.mebibytes} MiB" for u in devices.compute_apps()]


def lines(log: str, word: str) -> list[str]:
    return [line for line in log.splitlines() if word in line]


if __name__ == "__main__":
    sys.exit(main())
