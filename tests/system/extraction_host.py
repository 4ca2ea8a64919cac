"""A borrowed host in a temporary folder, driven as a person would: ``python -m hsx_host VERB``."""

from __future__ import annotations

import gzip
import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import models
import sglang_server

from hsx_host import contract

LAYERS = [2, 5, 7]
CHUNK = 64


def spec_of(
    root: Path, model: Path, data: Path, *, layers: Sequence[int] = LAYERS, **settings: Any
) -> contract.RunSpec:
    """A RunSpec of real SGLang on the CPU, forked as by ``sglang_server.start``; ``settings`` go to DataSettings."""

    def server(port: int, *flags: str) -> contract.ServerSettings:
        address = ["--model-path", str(model), "--host", "127.0.0.1", "--port", str(port)]
        chunk = ["--chunked-prefill-size", str(CHUNK)]
        path = os.pathsep.join([str(sglang_server.CPU), str(sglang_server.FORKED)])
        env = {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        args = [*address, *sglang_server.FLAGS, *chunk, *flags]
        return contract.ServerSettings(args, env, "127.0.0.1", port, 900.0, 10.0, 2)

    port = sglang_server.free_port()
    values = {"shard_size": 16, "concurrency": 6, "tries": 2, "request_timeout_s": 60.0, "proof_samples": 4, **settings}
    return contract.RunSpec(
        run_id="system test",
        profile="tiny",
        manager="process",
        host=contract.HostSettings(sys.executable, str(root / "home"), str(root / "output")),
        production=server(port),
        extraction=server(port, "--disable-radix-cache"),
        model=contract.ModelSettings(str(model), "random"),
        capture=contract.CaptureSettings(list(layers), ["speculators_v1"], writers=2, ring_bytes=1 << 22),
        data=contract.DataSettings(path=str(data), name=data.name.split(".")[0], **values),
        benchmark=contract.BenchmarkSettings(False, {}),
        cleanup=contract.CleanupSettings(),
        lease_ttl_s=3600.0,
    )


def write_data(path: Path, lengths: Sequence[int], seed: int = 0) -> Path:
    """Random samples of these lengths with random masks, as ``.jsonl`` or ``.jsonl.gz``."""
    rng = random.Random(seed)
    opener = gzip.open if path.name.endswith(".gz") else open
    with opener(path, "wt") as f:
        for i, n in enumerate(lengths):
            ids = models.prompt(seed * 100_000 + i, n)
            f.write(json.dumps({"input_ids": ids, "loss_mask": [rng.randrange(2) for _ in ids]}) + "\n")
    return path


class Host:
    """Runs verbs of one spec, and others that share its server."""

    def __init__(self, root: Path, spec: contract.RunSpec) -> None:
        self.root, self.spec = root, spec

    def with_data(self, data: Path, **settings: Any) -> Host:
        """The same host and server, with another data file."""
        changed = replace(self.spec.data, path=str(data), name=data.name.split(".")[0], **settings)
        return Host(self.root, replace(self.spec, data=changed))

    def command(self, verb: str, *args: str) -> list[str]:
        path = self.root / f"spec-{self.spec.data.name}.json"
        path.write_text(contract.encode(self.spec))
        return [sys.executable, "-m", "hsx_host", verb, "--spec", str(path), *args]

    def start(self, verb: str, *args: str) -> subprocess.Popen[str]:
        """A verb beside the test, its stderr as a pipe."""
        return subprocess.Popen(
            self.command(verb, *args), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ)
        )

    def verb(self, verb: str, *args: str, code: int = 0) -> dict[str, Any]:
        """Run a verb to its end; its one document. The exit code is asserted."""
        done = subprocess.run(self.command(verb, *args), capture_output=True, text=True, timeout=600)
        assert done.returncode == code, f"{verb} ended with {done.returncode}:\n{done.stdout}\n{done.stderr[-4000:]}"
        document: dict[str, Any] = json.loads(done.stdout)
        return document

    @property
    def dataset(self) -> Path:
        """The data set's folder; plan must have run."""
        (found,) = Path(self.spec.host.output_root).glob(f"tiny-{self.spec.data.name}-*")
        return found

    def manifest(self, shard: int = 0) -> dict[int, dict[str, Any]]:
        """The whole lines of a shard's manifest, by row: one may be half written, or have been cut."""
        path = self.dataset / f"shards/{shard:05d}/manifest.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return {d["index"]: d for d in (json.loads(line) for line in lines if line.endswith(b"\n"))}
