"""What the unit tests of the data half share: a tiny model folder, data files, and a spec in a temporary home."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsx_host import contract as c
from hsx_host import fingerprint, formats
from hsx_host.formats import speculators_v1 as v1

VOCAB, HIDDEN, BLOCKS, CONTEXT = 300, 64, 8, 512
PLANES = ["layer_1", "layer_3", "layer_6", "final"]
SHAPE = formats.Shape(PLANES, HIDDEN, "bfloat16")


def make_model(folder: Path, **changes: Any) -> Path:
    """config.json and one weights file with a head of random rows."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": BLOCKS, "hidden_size": HIDDEN, "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)
    head = torch.randn(VOCAB, HIDDEN, generator=generator).bfloat16()
    save_file({"lm_head.weight": head}, folder / "model.safetensors")
    return folder


def make_spec(
    root: Path,
    data: Path,
    *,
    layers: Iterable[int] = (1, 3, 6),
    formats: Iterable[str] = ("speculators_v1",),
    **settings: Any,
) -> c.RunSpec:
    """A spec whose model and data are ``make_model``'s and a file; ``settings`` go to DataSettings."""
    model = root / "model"
    if not model.exists():
        make_model(model)
    server = c.ServerSettings(["--port", "1", "--chunked-prefill-size", "64"], {}, "127.0.0.1", 1)
    values = {"shard_size": 4, **settings}
    name = values.pop("name", data.name.split(".")[0])
    return c.RunSpec(
        run_id="unit", profile="tiny", manager="process",
        host=c.HostSettings(sys.executable, str(root / "home"), str(root / "out")),
        production=server, extraction=server, model=c.ModelSettings(str(model), "r1"),
        capture=c.CaptureSettings(list(layers), list(formats)),
        data=c.DataSettings(path=str(data), name=name, **values),
        benchmark=c.BenchmarkSettings(False, {}), cleanup=c.CleanupSettings(),
    )  # fmt: skip


def line(ids: Any, mask: Any = None) -> str:
    return json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids) if mask is None else mask})


def write_lines(path: Path, lines: Iterable[str]) -> Path:
    text = "".join(one + "\n" for one in lines)
    if path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return path


def samples(count: int, first: int = 5) -> list[str]:
    """Different samples of ``first``, ``first`` + 1, ... tokens."""
    return [line([(7 * i + j) % VOCAB for j in range(first + i)]) for i in range(count)]


def states(tokens: int, seed: int = 0) -> list[torch.Tensor]:
    """Random planes, [tokens, HIDDEN] bf16 each."""
    generator = torch.Generator().manual_seed(seed)
    planes = [torch.randn(tokens, HIDDEN, generator=generator) for _ in PLANES]
    planes[-1] *= 1 + 3 * torch.rand(tokens, 1, generator=generator)  # before a norm, rows have lengths of their own
    return [plane.bfloat16() for plane in planes]


def fill(path: Path, laid: formats.Laid, planes: list[torch.Tensor]) -> dict[str, int]:
    """What the capture plugin does: put rows in their places (last first, to show that order does not matter).

    Planes that lie side by side have one checksum together.
    """
    import os
    import zlib

    crcs = dict(laid.crcs)
    fd = os.open(path, os.O_WRONLY)
    for plane, tensor in zip(laid.planes, planes, strict=True):
        data = tensor.view(torch.int16).numpy().tobytes()
        size = len(data) // len(tensor)
        for row in reversed(range(len(tensor))):
            os.pwrite(fd, data[row * size : (row + 1) * size], plane.offset + row * plane.row_stride)
        beside = [
            other.view(torch.int16)
            for place, other in zip(laid.planes, planes, strict=True)
            if plane.row_stride > size and place.row_stride == plane.row_stride
        ]
        crcs[plane.name] = zlib.crc32(torch.cat(beside, 1).numpy().tobytes() if beside else data)
    os.close(fd)
    return crcs


def sample_file(path: Path, ids: Any, mask: Any, planes: list[torch.Tensor], form: Any = v1) -> dict[str, int]:
    """A whole file as an extraction leaves it; its checksums."""
    ids, mask = np.asarray(ids, np.int32), np.asarray(mask, np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    laid = form.lay_out(path, ids, mask, SHAPE)
    found: dict[str, int] = form.complete(path, laid, fill(path, laid, planes), SHAPE)
    return found


def publish(spec: c.RunSpec, rows: Iterable[int] | None = None) -> Path:
    """Publish planned rows with random states, as ``extract`` does with captured ones; the data set's folder."""
    from safetensors.torch import save_file

    from hsx_host import proof
    from hsx_host.manifest import Ledger, Published
    from hsx_host.shards import ShardFiles, read_input, shard_ids

    dataset, meaning = fingerprint.opened(spec)
    form = formats.primary(meaning.formats)
    weight = 1 + 0.3 * torch.randn(HIDDEN, generator=torch.Generator().manual_seed(7))
    norm = {"weight": weight.bfloat16(), "eps": torch.tensor([1e-5], dtype=torch.float64)}
    save_file(norm, dataset / proof.NORM_FILE)
    prover = proof.NextToken(spec.model.path, dataset / proof.NORM_FILE, final=meaning.final)
    head = torch.from_numpy(prover.head.rows(0, prover.head.shape[0]))
    for shard in shard_ids(dataset):
        files = ShardFiles(dataset, shard)
        given = read_input(files)
        ledger: Ledger[Published] = Ledger(files.manifest)
        for i in range(len(given)):
            one = given.sample(i)
            if rows is not None and one.row not in rows:
                continue
            planes = states(len(one.ids), one.row)
            if meaning.final == "after_norm":
                planes[-1] = prover.norm.apply(planes[-1])
            name = f"{form.FOLDER}/{form.file_name(one.row)}"
            path = dataset / name
            crcs = sample_file(path, one.ids, one.mask, planes, form)
            token = int((head @ prover.normed(planes[-1][-1]).float()).argmax())
            size = path.stat().st_size
            ledger.append(
                Published(one.row, len(one.ids), name, size, one.hash.hex(), crcs, token, f"hsx-{one.row}", 1.0)
            )
        ledger.close()
    return dataset


def tree(folder: Path) -> dict[str, bytes]:
    """Every file below a folder; locks aside."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def refuses(error: type[Exception], field: str, *words: str) -> Any:
    """``pytest.raises`` that also looks at the error's field and message; use as a context manager."""

    class _Context:
        def __enter__(self) -> None:
            self._raises = pytest.raises(error)
            self._info = self._raises.__enter__()

        def __exit__(self, *what: Any) -> bool:
            swallowed = bool(self._raises.__exit__(*what))
            assert self._info.value.doc.field == field, self._info.value.doc  # type: ignore[attr-defined]
            for word in words:
                assert word in str(self._info.value), (word, str(self._info.value))
            return swallowed

    return _Context()
