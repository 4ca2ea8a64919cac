"""speculators v1: one ``torch.save`` file a sample, read by speculators 0.3 to 0.7 (0.8 and later don't).

A dict of ``input_ids`` long [n], ``hidden_states`` list of [n, H] (layers ascending, last the final hidden
state before the final norm) and ``loss_mask`` long [n], loadable with ``torch.load(mmap=True, weights_only=True)``.
Source: speculators 0.7.0, train/data.py (``standardize_data_v1``, ``SampleFileDataset``). Its reader takes every file
below the folder whose name ends in ``pt``, so that nothing else may lie there under such a name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hsx_host.formats import Listed, Row, Shape
from hsx_host.layouts import faults
from hsx_host.layouts.fields import Field, ids, mask
from hsx_host.layouts.torchfile import Body, TorchFile
from hsx_host.state import write_text

NAME = "speculators_v1"
FOLDER = "v1"
NORM = "before"
SIDE = ("sample_lengths.json", "data_config.json")


def file_name(row: int) -> str:
    """``data_<row>.pt``."""
    return f"data_{row}.pt"


def _body(tokens: int, shape: Shape) -> Body:
    plane = (tokens, shape.hidden_size)
    states = [Field(name, plane, shape.dtype, (name,)) for name in shape.planes]
    return {"input_ids": ids(tokens), "hidden_states": states, "loss_mask": mask(tokens)}


_FILES = TorchFile(_body)
file_bytes, lay_out, complete, check, planes, load = (
    _FILES.file_bytes, _FILES.lay_out, _FILES.complete, _FILES.check, _FILES.planes, _FILES.load,
)  # fmt: skip


def side_files(folder: Path, rows: Iterable[Row], facts: dict[str, Any]) -> None:
    """``sample_lengths.json`` (complete, or the reader ignores it as a whole) and ``data_config.json`` (for people)."""
    write_text(folder / "sample_lengths.json", json.dumps({str(r.row): r.tokens for r in rows}) + "\n")
    write_text(folder / "data_config.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")


def side_bytes(samples: int, tokens: int) -> int:
    """Room for ``data_config.json``, and for a row number and a length a sample."""
    return (1 << 14) + 32 * samples


def side_wrong(folder: Path, listed: Mapping[int, Listed], deep: bool) -> list[str]:
    """``sample_lengths.json``: the reader packs its batches by it."""
    lengths = folder / "sample_lengths.json"
    try:
        found = json.loads(lengths.read_bytes())
    except (OSError, ValueError) as e:
        return [f"sample_lengths.json can't be read ({faults.reason(lengths, e)})"]
    same = found == {str(row): line.tokens for row, line in listed.items()}
    return [] if same else ["sample_lengths.json does not hold the lengths of the samples"]
