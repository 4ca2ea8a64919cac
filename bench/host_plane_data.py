"""Data sets, processes and a stand-in engine for ``host_plane.py``.

As a program: ``engine SPOOL`` (prints its port), or a verb in a process of its own (prints seconds and peak memory).
"""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import zlib
from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
for folder in ("include", "include/patches/hsx_capture"):
    if str(ROOT / folder) not in sys.path:
        sys.path.insert(0, str(ROOT / folder))

from hsx_host import contract as c  # noqa: E402
from hsx_host import extract, fingerprint, formats, manifest, verify  # noqa: E402
from hsx_host import plan as plan_verb  # noqa: E402
from hsx_host.formats import speculators_v1 as v1  # noqa: E402
from hsx_host.norm import NORM_FILE  # noqa: E402
from hsx_host.shards import ShardFiles, read_input  # noqa: E402

VOCAB, BLOCKS, CONCURRENCY = 32_000, 8, 16
PIECE = 1 << 20
CHUNK = 400  # rows


def write_plain(path: Path, source: Any, times: int) -> None:
    """A sequential write of the bytes to a new file, ``times`` over: as near to the core as the writers' slot is."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for _ in range(times):
        for at in range(0, len(source), PIECE):
            os.write(fd, memoryview(source[at : at + PIECE]))
    os.close(fd)


def batch(source: Any, planes: int, tokens: int, hidden: int) -> Any:
    """Two samples as the peers' models give them: bf16 [2, tokens, planes * hidden]."""
    import torch

    one = torch.from_numpy(source).view(torch.bfloat16).view(1, tokens, planes * hidden)
    return torch.cat([one, one])


def torch_save(job: tuple[Any, Path]) -> None:
    """One sample of a batch: sliced, copied, saved. As SpecForge's prepare_hidden_states.py and speculators 0.3 do."""
    import torch

    states, path = job
    wide = states.shape[-1] // 4
    body = {"aux_hidden_state": states[1:, :, : 3 * wide].clone(), "hidden_state": states[1:, :, 3 * wide :].clone()}
    torch.save(body, path)


def torch_gzip(job: tuple[Any, Path]) -> None:
    """The same, compressed."""
    import torch

    buffer = io.BytesIO()
    torch.save(job[0][1:].clone(), buffer)
    job[1].write_bytes(gzip.compress(buffer.getvalue(), 1))


def clear(work: Path) -> None:
    """Remove what a round left."""
    for path in work.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def run_writers(
    work: Path, layout: str, threads: int, samples: int, planes: int, tokens: int, hidden: int, source: Any
) -> tuple[float, float]:
    """Seconds and CPU seconds in which the plugin's writers fill ``samples`` laid-out files, ``CHUNK`` rows a chunk."""
    import torch

    from hsx_capture.layout import blocks, file_bytes
    from hsx_capture.ring import SLOTS, Ring
    from hsx_capture.sample import Sample
    from hsx_capture.spec import CaptureRequest, Plane
    from hsx_capture.writer import Chunk, Writers

    row, rows = 2 * hidden, CHUNK
    ring = Ring(
        SLOTS * ((rows + 1) * (planes * (row + 8) + 8) + 512), planes, hidden, torch.bfloat16, torch.device("cpu")
    )
    places = {
        "planes": [Plane(str(i), i * tokens * row, row) for i in range(planes)],
        "rows": [Plane(str(i), i * row, planes * row) for i in range(planes)],
        "mixed": [
            *(Plane(str(i), i * row, (planes - 1) * row) for i in range(planes - 1)),
            Plane("final", tokens * (planes - 1) * row, row),
        ],
    }[layout]
    parts = blocks(places, row)
    values = torch.from_numpy(source).view(torch.bfloat16).view(planes, tokens, hidden)
    ids = torch.arange(rows)
    slot, copied = ring.fill([p[:rows].nan_to_num() for p in values], ids, 0, rows, tuple(b.planes for b in parts))
    slot.hand_to(1 << 30, copied)
    crc = zlib.crc32(np.tile(ids.numpy().astype("<i8"), tokens // rows).tobytes())
    made = []
    for i in range(samples):
        path = work / f"hsx-{i}.part"
        with path.open("wb") as f:
            f.truncate(file_bytes(parts, tokens, row))
        (work / f"hsx-{i}.json").write_text("{}")
        made.append(Sample(f"hsx-{i}", CaptureRequest(f"hsx-{i}", str(path), tokens, crc, places), row))
    writers = Writers(threads, work, row)
    began, cpu = time.perf_counter(), time.process_time()
    for at in range(0, tokens, rows):
        for sample in made:
            writers.put(Chunk(sample, slot, 0, at, rows))
    writers.close()
    spent = time.perf_counter() - began, time.process_time() - cpu
    for sample in made:
        record = json.loads((work / f"{sample.rid}.done.json").read_text())
        if record["error"] or record["rows"] != tokens:
            raise SystemExit(f"a writer failed: {record['error']}")
    return spent


class Planned:
    """A data file and its spec: ``lengths`` tokens a sample, in one shard where ``shard_size`` is 0."""

    def __init__(self, work: Path, lengths: list[int], hidden: int = 64, shard_size: int = 0) -> None:
        self.root = work / f"set-{len(lengths)}"
        model = self.root / "model"
        model.mkdir(parents=True)
        config = {
            "architectures": ["LlamaForCausalLM"], "num_hidden_layers": BLOCKS, "hidden_size": hidden,
            "vocab_size": VOCAB, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        }  # fmt: skip
        (model / "config.json").write_text(json.dumps(config))
        save_file({"lm_head.weight": np.zeros((8, hidden), np.float32)}, model / "model.safetensors")
        self.data = self.root / "bench.jsonl"
        rng = random.Random(0)
        with self.data.open("w") as f:
            for n in lengths:
                f.write(
                    json.dumps({"input_ids": [rng.randrange(VOCAB) for _ in range(n)], "loss_mask": [1] * n}) + "\n"
                )
        server = c.ServerSettings(["--port", "1", "--context-length", "32768"], {}, "127.0.0.1", 1)
        self.spec = c.RunSpec(
            run_id="bench", profile="bench", manager="process",
            host=c.HostSettings(sys.executable, str(self.root / "home"), str(self.root / "out")),
            production=server, extraction=server, model=c.ModelSettings(str(model)),
            capture=c.CaptureSettings([1, 3, 6], ["speculators_v1"]),
            data=c.DataSettings(
                str(self.data), "bench", shard_size=shard_size or len(lengths), concurrency=CONCURRENCY, proof_samples=0
            ),
            benchmark=c.BenchmarkSettings(False, {}), cleanup=c.CleanupSettings(),
        )  # fmt: skip

    def parse(self) -> None:
        """What any reader of the file has to do."""
        with self.data.open("rb") as f:
            for line in f:
                json.loads(line)

    def remove(self) -> None:
        shutil.rmtree(self.root)


class Published(Planned):
    """A data set that is extracted already. ``whole``: with random states and right checksums, else sparse files."""

    def __init__(self, work: Path, *, samples: int, tokens: int, hidden: int, whole: bool) -> None:
        super().__init__(work, [tokens] * samples, hidden)
        plan_verb.run(self.spec, Namespace(dry_run=False, failed=False))
        self.dataset, self.meaning = fingerprint.opened(self.spec)
        shape = formats.Shape(self.meaning.planes, hidden, self.meaning.dtype)
        files = ShardFiles(self.dataset, 0)
        given = read_input(files)
        (self.dataset / v1.FOLDER).mkdir()
        norm = {"weight": np.ones(hidden, np.float16), "eps": np.array([1e-5])}
        save_file(norm, self.dataset / NORM_FILE)  # without it, extract wants the server
        plane = np.random.default_rng(0).integers(0, 256, tokens * hidden * 2, dtype=np.uint8).tobytes()
        lines = []
        for i in range(samples):
            one = given.sample(i)
            path = self.dataset / v1.FOLDER / v1.file_name(one.row)
            laid = v1.lay_out(path, one.ids, one.mask, shape)
            crcs = laid.crcs | dict.fromkeys(shape.planes, zlib.crc32(plane) if whole else 0)
            if whole:
                with path.open("r+b") as f:
                    for place in laid.planes:
                        os.pwrite(f.fileno(), plane, place.offset)
                v1.complete(path, laid, crcs, shape)
            name = f"{v1.FOLDER}/{path.name}"
            lines.append(
                manifest.Published(one.row, tokens, name, laid.bytes, one.hash.hex(), crcs, 1, f"hsx-{i}", time.time())
            )
        manifest.rewrite(files.manifest, lines)

    def extract(self) -> None:
        """The verb, with nothing to do."""
        if extract.run(self.spec, Namespace(shard=0, stop_after=0.0)).extracted:
            raise SystemExit("the data set was not taken for whole")

    def verify(self, *, deep: bool) -> None:
        report = verify.check(self.spec, self.dataset, self.meaning, deep=deep)
        if not report.ok:
            raise SystemExit(f"verify: {report.problems}")


def planned(work: Path, samples: int, tokens: int, *, shard_size: int) -> Planned:
    """Samples of ``tokens`` tokens, or of 99 to 200 where it is 0."""
    rng = random.Random(1)
    return Planned(work, [tokens or rng.randint(99, 200) for _ in range(samples)], shard_size=shard_size)


def measured(work: Path, made: Planned, verb: str) -> tuple[float, float, int]:
    """Clock and CPU seconds of a verb in a process of its own, and the process's greatest memory in MB."""
    spec_file = made.root / "spec.json"
    spec_file.write_text(c.encode(made.spec))
    with engine(work / "spool") if verb == "extract" else nothing() as url:
        command = [sys.executable, __file__, verb, str(spec_file), url, str(work / "spool")]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    clock, cpu, peak = done.stdout.split()
    return float(clock), float(cpu), int(peak)


def bare_requests(work: Path, made: Planned) -> float:
    """CPU seconds of the same requests with nothing else, from as many threads."""
    import requests

    bodies = [json.loads(line)["input_ids"] for line in made.data.open()]
    with engine(work / "spool") as url:
        sessions = [requests.Session() for _ in range(CONCURRENCY)]

        def post(k: int) -> None:
            for ids in bodies[k::CONCURRENCY]:
                sessions[k].post(f"{url}/generate", json={"rid": "nobody", "input_ids": ids}, timeout=60)

        began = time.process_time()
        with ThreadPoolExecutor(CONCURRENCY) as pool:
            list(pool.map(post, range(CONCURRENCY)))
        return time.process_time() - began


@contextmanager
def nothing() -> Iterator[str]:
    yield ""


@contextmanager
def engine(spool: Path) -> Iterator[str]:
    """The stand-in engine in a process of its own; its address."""
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir()
    with subprocess.Popen([sys.executable, __file__, "engine", str(spool)], stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdout is not None
            yield f"http://127.0.0.1:{int(child.stdout.readline())}"
        finally:
            child.terminate()


def serve_engine(spool: Path) -> None:
    """Answer every request at once; where it was laid out for, write the record that the plugin would."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked = spool / f"{body['rid']}.json"
            if asked.exists():
                record(json.loads(asked.read_bytes()))
            n = len(body.get("input_ids", []))
            data = json.dumps({"output_ids": [1], "meta_info": {"prompt_tokens": n, "cached_tokens": 0}}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            pass

    def record(asked: dict[str, Any]) -> None:
        facts = {"crc32": 0, "finite": True, "zero": False, "constant": False}
        planes = [{"name": p["name"], **facts} for p in asked["planes"]]
        body = {
            "type": "CaptureRecord", "version": 1, "rid": asked["rid"], "rows": asked["tokens"], "bytes": 0,
            "chunks": 1,
            "ids_crc32": asked["ids_crc32"], "planes": planes, "error": "",
        }  # fmt: skip
        temporary = spool / f"{asked['rid']}.tmp"
        temporary.write_text(json.dumps(body))
        temporary.replace(spool / f"{asked['rid']}.done.json")

    class Server(ThreadingHTTPServer):
        request_queue_size = 128

    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


def one_verb(verb: str, spec_file: str, url: str, spool: str) -> None:
    """Run ``plan`` or ``extract`` here; print clock and CPU seconds and peak memory."""
    from hsx_host import borrow, norm
    from hsx_host.client import Engine

    spec = c.decode(c.RunSpec, Path(spec_file).read_bytes())
    if verb == "extract":
        plan_verb.run(spec, Namespace(dry_run=False, failed=False))

        @contextmanager
        def borrowed(given: c.RunSpec) -> Iterator[None]:
            yield

        borrow.extraction_server = borrowed  # type: ignore[assignment]
        extract.live_engine = lambda given: Engine(url, Path(spool), lambda: True)
        extract.ready_norm_class = lambda where: "RMSNorm"
        norm.keep_norm = lambda spool, norm_class, dataset: dataset
    began, cpu = time.perf_counter(), time.process_time()
    if verb == "plan":
        plan_verb.run(spec, Namespace(dry_run=False, failed=False))
    else:
        done = extract.run(replace(spec), Namespace(shard=0, stop_after=0.0))
        if done.failed or done.published != done.samples:
            raise SystemExit(f"extract: {done.failures}")
    spent, used = time.perf_counter() - began, time.process_time() - cpu
    peak = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert peak is not None
    print(f"{spent:.3f} {used:.3f} {int(peak[1]) // 1024}")


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        serve_engine(Path(sys.argv[2]))
    else:
        one_verb(*sys.argv[1:])
