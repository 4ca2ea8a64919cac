"""Start and stop one real SGLang server on the CPU, for tests.

Everything of it dies with its own session: the server is started as a session leader, and only that process group is
ever signalled.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PATCHES = Path(__file__).resolve().parents[2] / "include" / "patches"
CPU, CAPTURE = PATCHES / "hsx_cpu", PATCHES / "hsx_capture"
FORKED = Path(__file__).resolve().parent / "forked"
FLAGS = [
    "--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--disable-cuda-graph",
    "--sleep-on-idle",  # an idle scheduler else spins on a core that the other tests need
    "--max-total-tokens", "16384", "--context-length", "2048", "--random-seed", "0",
    "--mem-fraction-static", "0.6",  # SGLang's own choice is below 0 where other work has the memory
]  # fmt: skip
CHUNK = 256
# Two ranks on a CPU talk by gloo. PyTorch brings NCCL along, which SGLang 0.5.14 uses on a CPU too where it finds it.
_TWO_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1", "SGLANG_NCCL_SO_PATH": "/nowhere/libnccl.so.2"}
# SGLang 0.5.23 wants the cores of data-parallel ranks named as well; these refuse more parts than tensor ranks.
_BIND_TENSOR_RANKS_ALONE = ("0.5.14", "0.5.17")


def ranks(args: Sequence[str]) -> dict[str, str]:
    """The variables with which a server of these flags starts its two ranks on a CPU."""
    data_parallel = "--dp-size" in args and importlib.metadata.version("sglang") not in _BIND_TENSOR_RANKS_ALONE
    return _TWO_RANKS if data_parallel or "--tp-size" in args else {}


def free_port() -> int:
    """A port that nobody listens on now. SGLang 0.5.14 wants 10,000 above it to be a port too, for gRPC."""
    while True:
        with socket.socket() as s:
            s.bind(("127.0.0.1", 0))
            port = int(s.getsockname()[1])
        if port + 10_000 < 1 << 16:
            return port


@dataclass
class Server:
    """A running server. ``log`` is its output; ``process`` leads its own session."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def get(self, path: str, timeout: float = 30) -> bytes:
        with urllib.request.urlopen(self.url + path, timeout=timeout) as answer:
            return bytes(answer.read())

    def generate(self, ids: Sequence[int], *, rid: str | None = None, tokens: int = 1, timeout: float = 120) -> Any:
        """Greedy completion of token ids; answers ``/generate``'s document. Raises HTTPError where it refuses."""
        body: dict[str, Any] = {
            "input_ids": list(ids),
            "sampling_params": {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True},
        }
        if rid is not None:
            body["rid"] = rid
        request = urllib.request.Request(
            self.url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.loads(answer.read())

    def stop(self) -> None:
        """SIGTERM to the group, SIGKILL to what is left of it."""
        for sig, wait in ((signal.SIGTERM, 15), (signal.SIGKILL, 10)):
            try:
                os.killpg(self.process.pid, sig)
            except ProcessLookupError:
                break
            try:
                self.process.wait(wait)
            except subprocess.TimeoutExpired:
                continue
        # the leader may be gone while children are not
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return


def start(
    model: Path,
    log: Path,
    *,
    spec: Path | None = None,
    plugin: bool = False,
    args: Sequence[str] = (),
    env: dict[str, str] | None = None,
    chunk: int = CHUNK,
    timeout: float = 600,
) -> Server:
    """Start a server of ``model`` on a free port and wait until it is healthy. Its children are forked (``forked/``).

    :param spec: with a CaptureSpec's file, the capture plugin is on the path and active, and the radix cache is off.
    :param plugin: the plugin's folder is on the path without a spec.
    """
    port = free_port()
    path = [str(CPU)] + ([str(CAPTURE)] if plugin or spec else []) + [str(FORKED)]
    own = {k: v for k, v in os.environ.items() if k != "HSX_CAPTURE_SPEC"}
    own |= {"PYTHONPATH": os.pathsep.join(path), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    own |= {"HSX_CAPTURE_SPEC": str(spec)} if spec else {}
    own |= ranks(args) | (env or {})
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model),
        "--host", "127.0.0.1", "--port", str(port), "--chunked-prefill-size", str(chunk), *FLAGS,
        *(["--disable-radix-cache"] if spec else []), *args,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=own, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    server = Server(process, port, log)
    try:
        wait_healthy(server, timeout)
    except BaseException:
        server.stop()
        raise
    return server


def wait_healthy(server: Server, timeout: float) -> None:
    """Wait until ``/health`` answers 200 (a token was generated); raises with the log's end otherwise."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        if server.process.poll() is not None:
            break
        try:
            server.get("/health")
            return
        except OSError:
            time.sleep(0.5)
    tail = server.log.read_text(errors="replace")[-4000:]
    raise RuntimeError(f"the server did not become healthy (exit code {server.process.poll()}):\n{tail}")
