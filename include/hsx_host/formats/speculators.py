"""speculators 0.5 to 0.9: an Arrow data set beside ``hidden_states/hs_<i>.safetensors``.

Each file has ``hidden_states`` [n, L+1, H] (the final before the norm last) and ``token_ids`` long [n]; ours also has
``loss_mask`` long [n], so that a file says all of its sample. i is the position in the Arrow data set, which has no
gaps, while rows of a data file may be rejected. So samples are written to ``rows/hs_<row>.safetensors``, and
``hidden_states/`` holds a second name (a hard link, no copy) for each. Source: speculators 0.9.0, train/data.py
(``ArrowDataset``), data_generation/offline.py and hs_connectors 0.9.0, transfer.py.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hsx_host.checksum import crc32
from hsx_host.errors import BadInput
from hsx_host.formats import Listed, Row, Shape
from hsx_host.layouts import faults
from hsx_host.layouts.fields import Field, ids, mask
from hsx_host.layouts.safetensors_file import SafetensorsFile
from hsx_host.state import write_text

NAME = "speculators"
FOLDER = "speculators"
NORM = "before"
SIDE = ("hidden_states/*", "data-*.arrow", "dataset_info.json", "state.json", "data_config.json")

_STATE = "state.json"


def file_name(row: int) -> str:
    """``rows/hs_<row>.safetensors``."""
    return f"rows/hs_{row}.safetensors"


def _fields(tokens: int, shape: Shape) -> list[Field]:
    states = (tokens, len(shape.planes), shape.hidden_size)
    return [
        Field("hidden_states", states, shape.dtype, tuple(shape.planes)),
        ids(tokens, "token_ids"),
        mask(tokens),
    ]


_FILES = SafetensorsFile(_fields)
file_bytes, lay_out, complete, check, planes, load = (
    _FILES.file_bytes, _FILES.lay_out, _FILES.complete, _FILES.check, _FILES.planes, _FILES.load,
)  # fmt: skip


def side_files(folder: Path, rows: Iterable[Row], facts: dict[str, Any]) -> None:
    """The Arrow data set (``input_ids``, ``loss_mask``, ``seq_len``, ``row``) and the numbered names of its samples.

    ``state.json``, without which the folder does not load, goes first and comes back last.
    """
    known = list(rows)
    made = folder / ".arrow.tmp"
    shutil.rmtree(made, ignore_errors=True)
    needed = side_bytes(len(known), sum(one.tokens for one in known))
    with faults.room(folder, needed, "the Arrow data set and its cache"):
        try:
            _save_arrow(made, known)
        except BaseException:
            shutil.rmtree(made, ignore_errors=True)
            raise
        (folder / _STATE).unlink(missing_ok=True)
        _number(folder, known)
        for old in folder.glob("data-*.arrow"):
            old.unlink()
        for file in sorted(made.iterdir(), key=lambda p: p.name == _STATE):
            file.replace(folder / file.name)
        made.rmdir()
        write_text(folder / "data_config.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")


def side_bytes(samples: int, tokens: int) -> int:
    """``datasets`` writes everything to its cache, then again to its place.

    Int64 ids and mask a token; two offsets, the length, the row and a numbered name a sample; schema and documents.
    """
    return 2 * (16 * tokens + 96 * samples) + (1 << 16)


def side_wrong(folder: Path, listed: Mapping[int, Listed], deep: bool) -> list[str]:
    """Each numbered name is its row's sample, and the Arrow data set has these rows in this order."""
    rows, numbered = sorted(listed), folder / "hidden_states"
    names = {f"hs_{i}.safetensors": row for i, row in enumerate(rows)}
    there = {path.name for path in numbered.iterdir()} if numbered.is_dir() else set()
    there = {name for name in there if not faults.is_nfs_own(name)}
    wrong = [f"hidden_states/{name} is missing" for name in sorted(names.keys() - there)]
    wrong += [f"hidden_states/{name} is no sample's" for name in sorted(there - names.keys())]
    for name, row in names.items():
        if name in there and not _same_file(numbered / name, folder / file_name(row)):
            wrong.append(f"hidden_states/{name} is not the sample of row {row}")
    if not (folder / "dataset_info.json").is_file():
        wrong.append("dataset_info.json is missing")
    try:
        files = [str(one["filename"]) for one in json.loads((folder / _STATE).read_bytes())["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as e:
        return [*wrong, f"{_STATE} can't be read ({faults.reason(folder / _STATE, e)})"]
    return wrong + _arrow_wrong([folder / name for name in files], rows, listed, deep)


def _same_file(one: Path, other: Path) -> bool:
    """One file under two names, or, where a copy of the folder knew no links, with the same header: it holds the
    checksums of the data."""
    try:
        if os.path.samefile(one, other):
            return True
        with one.open("rb") as a, other.open("rb") as b:
            heads = [f.read(8 + int.from_bytes(f.read(8), "little") % (1 << 20)) for f in (a, b)]
        return heads[0] == heads[1] and one.stat().st_size == other.stat().st_size
    except OSError as e:
        faults.reason(one, e)
        return False


def _arrow_wrong(files: list[Path], rows: list[int], listed: Mapping[int, Listed], deep: bool) -> list[str]:
    try:
        import pyarrow
    except ImportError:
        if not deep:
            return []  # a training host, say: the trainer's own Python has it
        raise BadInput(
            "the package pyarrow is missing on the host: the Arrow data set can't be read",
            field="capture.formats",
            value=NAME,
            fix="pip install datasets under host.python",
        ) from None
    found: list[int] = []
    for file in files:
        try:
            with pyarrow.memory_map(str(file)) as source:
                for batch in pyarrow.ipc.open_stream(source):
                    batch_rows = batch.column("row").to_pylist()
                    found += batch_rows
                    for name, record in (("input_ids", "token_ids"), ("loss_mask", "loss_mask")) if deep else ():
                        column = batch.column(name)
                        for i, row in enumerate(batch_rows):
                            data = column[i].values.to_numpy()
                            crcs = (
                                listed[row].crc32 if row in listed else {}
                            )  # without it: a damaged line, told elsewhere
                            if record in crcs and crc32(data.astype("<i8").tobytes()) != crcs[record]:
                                return [f"{file.name} holds another {name} for row {row}"]
        except (OSError, ValueError, KeyError) as e:
            return [f"{file.name} can't be read ({faults.reason(file, e)})"]
    return [] if found == rows else [f"{_STATE} names files of {len(found)} rows that are not the {len(rows)} samples"]


def _number(folder: Path, rows: list[Row]) -> None:
    """``hidden_states/hs_<i>.safetensors`` for the i-th row: a hard link, or a link where there are none."""
    fresh, numbered = folder / ".hidden_states.tmp", folder / "hidden_states"
    shutil.rmtree(fresh, ignore_errors=True)
    fresh.mkdir(parents=True)
    for i, one in enumerate(rows):
        source, name = folder / file_name(one.row), fresh / f"hs_{i}.safetensors"
        try:
            os.link(source, name)
        except OSError:
            name.symlink_to(Path("..") / file_name(one.row))
    shutil.rmtree(numbered, ignore_errors=True)
    fresh.rename(numbered)


def _save_arrow(folder: Path, rows: list[Row]) -> None:
    """Written by ``datasets`` itself, in torch's output format (without it speculators 0.9 raises TypeError)."""
    try:
        import datasets
    except ImportError:
        raise BadInput(
            "the package datasets is missing on the host: the Arrow data set can't be written",
            field="capture.formats",
            value=NAME,
            fix="pip install datasets under host.python",
        ) from None

    def each() -> Iterator[dict[str, Any]]:
        for one in rows:
            tokens, losses = one.read()
            yield {
                "input_ids": tokens.astype("int64"),
                "loss_mask": losses.astype("int64"),
                "seq_len": one.tokens,
                "row": one.row,
            }

    whole = datasets.Value("int64")
    features = datasets.Features(
        {"input_ids": datasets.List(whole), "loss_mask": datasets.List(whole), "seq_len": whole, "row": whole}
    )
    datasets.disable_progress_bars()
    cache = folder.with_name(".arrow.cache.tmp")
    shutil.rmtree(cache, ignore_errors=True)
    try:
        # a fingerprint of our own: else datasets pickles the generator, and with it every sample, to make one
        name = uuid.uuid4().hex
        table = datasets.Dataset.from_generator(each, features=features, cache_dir=str(cache), fingerprint=name)
        table.set_format("torch")
        table.save_to_disk(str(folder))
    except (
        datasets.exceptions.DatasetGenerationError
    ) as e:  # hides what really happened: a full disk, an unreadable file
        raise e.__cause__ or e from None
    finally:
        shutil.rmtree(cache, ignore_errors=True)
