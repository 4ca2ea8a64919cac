"""Rows through collector, ring and writers, without a server: batches are made by hand.

``Batch`` stands for SGLang's ForwardBatch, whose four fields the seam reads; the real one is met in tests/system.
"""

from __future__ import annotations

import json
import threading
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from hsx_capture import ring as ring_module
from hsx_capture import spec
from hsx_capture.collect import Collector
from hsx_capture.model import Target
from hsx_capture.ring import Ring, Slot
from hsx_capture.sample import Sample as Captured
from hsx_capture.writer import Chunk, Failure, Writers

HIDDEN, LAYERS, ROW = 16, [2, 5], 32
PLANES = len(LAYERS) + 1


@dataclass
class Batch:
    rids: list[str]
    extend_seq_lens_cpu: Any
    extend_prefix_lens_cpu: Any
    extend: bool = True

    @property
    def forward_mode(self) -> Any:
        return SimpleNamespace(is_extend=lambda: self.extend)


def test_a_new_sample_goes_to_the_writer_with_the_least_to_do_and_stays_there(tmp_path: Path) -> None:
    writers = Writers(3, tmp_path, ROW)
    writers.close()  # nothing is worked off: what was given stays in the queues
    samples = [Captured(f"hsx-{i}", None, ROW) for i in range(5)]
    for sample, rows in zip(samples, (50, 10, 30, 10, 5), strict=True):
        writers.put(Chunk(sample, cast(Slot, None), 0, 0, rows))
    assert [s.writer for s in samples] == [0, 1, 2, 1, 1]
    writers.put(Chunk(samples[0], cast(Slot, None), 0, 50, 10))
    writers.put(Failure(samples[2], "gone"))
    assert (samples[0].writer, samples[2].writer) == (0, 2)


class Bench:
    """A collector with its ring and writers on a spool folder."""

    def __init__(self, spool: Path, rows: int = 8, writers: int = 2) -> None:
        self.spool = spool
        ring_bytes = ring_module.SLOTS * (rows * (PLANES * (ROW + 8) + 8) + 4 * 64)
        self.inner = SimpleNamespace(layers_to_capture=list(LAYERS))
        wanted = spec.CaptureSpec("id", str(spool), LAYERS, 8, HIDDEN, "bfloat16", writers, ring_bytes)
        self.ring = Ring(ring_bytes, PLANES, HIDDEN, torch.bfloat16, torch.device("cpu"))
        self.writers = Writers(writers, spool, self.ring.row_bytes)
        target = Target(SimpleNamespace(), self.inner, 8, HIDDEN, 1e-5)
        self.collector = Collector(wanted, target, self.ring, self.writers)

    def sample(self, rid: str, tokens: int, /, layout: str = "planes", seed: int = 0, **changes: Any) -> Sample:
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(PLANES, tokens, HIDDEN, generator=generator).to(torch.bfloat16)
        ids = torch.randint(0, 500, (tokens,), generator=generator)
        sample = Sample(self.spool / f"{rid}.bin", rid, values, ids, layout)
        sample.path.write_bytes(bytes(sample.size))
        names = [*map(str, LAYERS), "final"]
        planes = [{"name": n, "offset": o, "row_stride": s} for n, (o, s) in zip(names, sample.places, strict=True)]
        body = {"rid": rid, "path": str(sample.path), "tokens": tokens, "ids_crc32": sample.ids_crc32, "planes": planes}
        text = json.dumps({"type": "CaptureRequest", "version": 1, **body, **changes})
        (self.spool / f"{rid}.json").write_text(text)
        return sample

    def forward(self, *parts: tuple[Any, int, int], packed: bool = False, padding: int = 0, **changes: Any) -> None:
        """One forward pass of the rows [start, start + n) of each sample, as SGLang calls the seams."""
        values = torch.cat(
            [s.values[:, a : a + n] for s, a, n in parts] + [torch.zeros(PLANES, padding, HIDDEN).bfloat16()], 1
        )
        ids = torch.cat([s.ids[a : a + n] for s, a, n in parts] + [torch.zeros(padding, dtype=torch.int64)])
        aux: Any = list(values[:-1])
        if packed:
            aux = torch.cat(aux, dim=-1)
        batch = Batch([s.rid for s, _, _ in parts], [n for _, _, n in parts], [a for _, a, _ in parts])
        for name, value in changes.items():
            setattr(batch, name, value)
        self.collector.on_norm(None, (), (values[-1] * 0, values[-1]))
        self.collector.on_logits(None, ids, values[-1], None, batch, aux)

    def record(self, sample: Sample) -> dict[str, Any]:
        return dict(json.loads((self.spool / f"{sample.rid}.done.json").read_text()))

    def close(self) -> None:
        self.writers.close()


@dataclass
class Sample:
    path: Path
    rid: str
    values: torch.Tensor
    ids: torch.Tensor
    layout: str

    @property
    def tokens(self) -> int:
        return int(self.values.shape[1])

    @property
    def places(self) -> list[tuple[int, int]]:
        if self.layout == "planes":
            return [(10 + i * self.tokens * ROW, ROW) for i in range(PLANES)]
        gap = 6 if self.layout == "gaps" else 0
        return [(10 + i * ROW, PLANES * ROW + gap) for i in range(PLANES)]

    @property
    def size(self) -> int:
        offset, stride = self.places[-1]
        return offset + (self.tokens - 1) * stride + ROW

    @property
    def ids_crc32(self) -> int:
        return zlib.crc32(self.ids.numpy().astype("<i8").tobytes())

    def read(self) -> torch.Tensor:
        raw = self.path.read_bytes()
        rows = [[raw[o + r * s : o + r * s + ROW] for r in range(self.tokens)] for o, s in self.places]
        flat = np.frombuffer(b"".join(b"".join(plane) for plane in rows), dtype=np.uint8).copy()
        return torch.from_numpy(flat).view(torch.bfloat16).view(PLANES, self.tokens, HIDDEN)


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(tmp_path)
    yield bench
    bench.close()


def good(bench: Bench, *samples: Sample) -> None:
    bench.close()
    for sample in samples:
        record = bench.record(sample)
        assert record["error"] == ""
        assert (record["rows"], record["bytes"]) == (sample.tokens, sample.values.numel() * 2)
        assert record["ids_crc32"] == sample.ids_crc32
        assert torch.equal(sample.read(), sample.values)
        beside = [sample.values.transpose(0, 1)] * PLANES  # planes side by side have one checksum together
        each = sample.values if sample.layout == "planes" else beside
        assert [p["crc32"] for p in record["planes"]] == [
            zlib.crc32(x.contiguous().view(torch.uint8).numpy()) for x in each
        ]
    assert not list(bench.spool.glob("*.tmp"))


@pytest.mark.parametrize("layout", ["planes", "rows", "gaps"])
@pytest.mark.parametrize("packed", [False, True])
def test_chunks_over_slots_fill_the_file(bench: Bench, layout: str, packed: bool) -> None:
    sample = bench.sample("hsx-1", 45, layout)
    for start, n in ((0, 20), (20, 1), (21, 24)):
        bench.forward((sample, start, n), packed=packed)
    good(bench, sample)


def test_what_lies_between_the_rows_is_left_alone(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 3, "gaps")
    before = bytes(range(256)) * (1 + sample.size // 256)
    sample.path.write_bytes(before[: sample.size])
    bench.forward((sample, 0, 3))
    good(bench, sample)
    raw = sample.path.read_bytes()
    assert raw[:10] == before[:10]
    gap = 10 + PLANES * ROW
    assert raw[gap : gap + 6] == before[gap : gap + 6]


def test_a_batch_of_many_with_strangers_between_and_padding_behind(bench: Bench) -> None:
    samples = [
        bench.sample(f"hsx-{i}", n, "rows" if i == 2 else "planes", seed=i) for i, n in enumerate((3, 9, 4, 1, 30))
    ]
    stranger, unknown = (bench.sample(rid, 5, seed=9) for rid in ("HEALTH_CHECK_1", "hsx-unknown"))
    for s in (stranger, unknown):
        (bench.spool / f"{s.rid}.json").unlink()
    a, b, c, d, e = samples
    bench.forward((a, 0, 3), (stranger, 0, 5), (b, 0, 9), (unknown, 0, 5), (c, 0, 4), (d, 0, 1), (e, 0, 11), padding=7)
    bench.forward((e, 11, 19))
    good(bench, *samples)
    assert not (bench.spool / "HEALTH_CHECK_1.done.json").exists()
    assert not (bench.spool / "hsx-unknown.done.json").exists()


def test_lengths_may_be_tensors(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 5)
    bench.forward((sample, 0, 5), extend_seq_lens_cpu=torch.tensor([5]), extend_prefix_lens_cpu=torch.tensor([0]))
    good(bench, sample)


def test_a_retracted_request_starts_again(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 12)
    wrong = bench.sample("hsx-2", 12, seed=5)
    wrong.rid = "hsx-1"
    bench.forward((wrong, 0, 7))
    bench.forward((sample, 0, 9))
    bench.forward((sample, 9, 3))
    good(bench, sample)
    assert bench.record(sample)["chunks"] >= 2


def test_decode_steps_and_finished_requests_are_ignored(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 4)
    other = bench.sample("hsx-2", 4, seed=3)
    other.rid = "hsx-1"
    bench.forward((sample, 0, 1), extend=False)
    bench.forward((sample, 0, 4))
    bench.forward((other, 0, 4))
    good(bench, sample)


def test_a_record_of_an_earlier_server_process_is_left_alone(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 4)
    (bench.spool / "hsx-1.done.json").write_text("kept")
    bench.forward((sample, 0, 4))
    bench.close()
    assert (bench.spool / "hsx-1.done.json").read_text() == "kept"
    assert sample.path.read_bytes() == bytes(sample.size)


@pytest.mark.parametrize(
    ("chunks", "reason"),
    [
        ([(3, 5)], "a chunk starts at row 3, expected row 0; its prefix came from a cache"),
        ([(0, 3), (4, 4)], "a chunk starts at row 4, expected row 3"),
        ([(0, 3), (2, 6)], "a chunk starts at row 2, expected row 3"),
    ],
)
def test_chunks_that_do_not_join_are_an_error(bench: Bench, chunks: list[tuple[int, int]], reason: str) -> None:
    sample, beside = bench.sample("hsx-1", 8), bench.sample("hsx-2", 6, seed=2)
    for start, n in chunks:
        bench.forward((sample, start, n))
    bench.forward((beside, 0, 6))
    good(bench, beside)
    assert bench.record(sample)["error"] == reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokens": 7}, "8 rows came, CaptureRequest.tokens says 7"),
        ({"ids_crc32": 3}, "CaptureRequest.ids_crc32 says 3"),
        ({"path": "/nowhere/x"}, "No such file"),
        ({"tokens": 9000000}, "needs"),
    ],
)
def test_an_error_of_one_request_is_its_record_alone(bench: Bench, changes: dict[str, Any], reason: str) -> None:
    sample, beside = bench.sample("hsx-1", 8, **changes), bench.sample("hsx-2", 6, seed=2)
    bench.forward((sample, 0, 8), (beside, 0, 6))
    good(bench, beside)
    assert reason in bench.record(sample)["error"]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        ("layers", r"layers_to_capture is [2, 6], expected [2, 5]"),
        ("aux", "1 auxiliary hidden states came, expected 2"),
        ("none", "no auxiliary hidden states"),
        ("dtype", "plane 5 is torch.float32, expected torch.bfloat16"),
        ("rows", "plane 5 is [4, 16], expected [8, 16]"),
        ("final", "the final norm was not called"),
    ],
)
def test_a_forward_pass_of_another_shape_is_the_batchs_error(bench: Bench, spoil: str, reason: str) -> None:
    sample, later = bench.sample("hsx-1", 8), bench.sample("hsx-2", 4)
    aux: Any = list(sample.values[:-1])
    if spoil == "layers":
        bench.inner.layers_to_capture = [2, 6]
    changed = {"aux": aux[:1], "none": None, "dtype": [aux[0], aux[1].float()], "rows": [aux[0], aux[1][:4]]}
    if spoil != "final":
        bench.collector.on_norm(None, (sample.values[-1],), sample.values[-1])
    batch = Batch(["hsx-1"], [8], [0])
    bench.collector.on_logits(None, sample.ids, None, None, batch, changed.get(spoil, aux))
    bench.inner.layers_to_capture = list(LAYERS)
    bench.forward((later, 0, 4))
    good(bench, later)
    assert reason in bench.record(sample)["error"]


def test_the_norm_without_a_residual_gives_its_input(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 4)
    bench.collector.on_norm(None, (sample.values[-1],), sample.values[-1] * 0)
    bench.collector.on_logits(None, sample.ids, None, None, Batch(["hsx-1"], [4], [0]), list(sample.values[:-1]))
    good(bench, sample)


@pytest.mark.parametrize(
    ("value", "flags"),
    [
        (float("nan"), (False, False, False)),
        (float("inf"), (False, False, False)),
        (0.0, (True, True, True)),
        (3.0, (True, False, True)),
    ],
)
def test_planes_are_checked_over_the_whole_sample(bench: Bench, value: float, flags: tuple[bool, ...]) -> None:
    sample = bench.sample("hsx-1", 20)
    sample.values[2 if flags[0] is False else 1, 13 if flags[0] is False else slice(None)] = value
    bench.forward((sample, 0, 12))
    bench.forward((sample, 12, 8))
    bench.close()
    record = bench.record(sample)
    marked = record["planes"][2 if flags[0] is False else 1]
    assert (marked["finite"], marked["zero"], marked["constant"]) == flags
    clean = record["planes"][0]
    assert (clean["finite"], clean["zero"], clean["constant"]) == (True, False, False)


def test_a_constant_chunk_alone_is_not_a_constant_plane(bench: Bench) -> None:
    sample = bench.sample("hsx-1", 4)
    sample.values[0, :2], sample.values[0, 2:] = 1.0, 2.0
    bench.forward((sample, 0, 2))
    bench.forward((sample, 2, 2))
    good(bench, sample)
    assert not bench.record(sample)["planes"][0]["constant"]


def test_a_full_ring_makes_the_scheduler_wait_and_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), Writers._write
    monkeypatch.setattr(Writers, "_write", lambda self, chunk: (gate.wait(), real(self, chunk))[1])
    rows = bench.ring.slot_rows * ring_module.SLOTS
    sample = bench.sample("hsx-1", rows + 1)
    done = threading.Event()

    def forward() -> None:
        bench.forward((sample, 0, rows + 1))
        done.set()

    thread = threading.Thread(target=forward)
    thread.start()
    assert not done.wait(0.3)  # every slot is in use: the forward pass must stand still
    gate.set()
    thread.join(20)
    assert done.is_set()
    good(bench, sample)


def test_slots_come_back_after_errors(bench: Bench) -> None:
    for i in range(3 * ring_module.SLOTS):
        bench.forward((bench.sample(f"hsx-bad{i}", 8, path="/nowhere/x"), 0, 8))
    sample = bench.sample("hsx-1", 8)
    bench.forward((sample, 0, 8))
    good(bench, sample)


def test_what_is_remembered_is_bounded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hsx_capture.collect._REMEMBERED", 3)
    for i in range(9):
        bench.forward((bench.sample(f"hsx-{i}", 4), 0, 2))  # each is aborted halfway
    assert len(bench.collector._samples) == 3


def test_a_withdrawn_request_gets_no_record(bench: Bench) -> None:
    """The client is gone or has given up: it took its document and its file away in the middle."""
    sample = bench.sample("hsx-a", 6)
    bench.forward((sample, 0, 3))
    (bench.spool / "hsx-a.json").unlink()
    sample.path.unlink()
    bench.forward((sample, 3, 3))
    bench.writers.close()
    assert [p.name for p in bench.spool.glob("hsx-a*")] == []


def test_a_ring_too_small_for_a_row_is_refused() -> None:
    with pytest.raises(ValueError, match=r"CaptureSpec.ring_bytes: 100 is too small"):
        Ring(100, PLANES, HIDDEN, torch.bfloat16, torch.device("cpu"))
