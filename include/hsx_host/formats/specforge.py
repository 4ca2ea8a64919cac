"""SpecForge offline features: ``rows_<g>-<g+2000>/data_<row>.ckpt``, the final hidden state after the norm.

A dict of ``input_ids`` long [n], ``loss_mask`` long [n], ``aux_hidden_state`` [1, n, L*H] and ``hidden_state``
[1, n, H]. Source: SpecForge 0.2.0, runtime/data_plane/offline_reader.py and algorithms/eagle3/data.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hsx_host.formats import Listed, Row, Shape
from hsx_host.layouts.fields import Field, ids, mask
from hsx_host.layouts.torchfile import Body, TorchFile
from hsx_host.state import write_text

NAME = "specforge"
FOLDER = "specforge"
NORM = "after"
SIDE = ("data_config.json",)

_ROWS_A_FOLDER = 2000


def file_name(row: int) -> str:
    """The file of a row, in its folder of 2000."""
    first = row - row % _ROWS_A_FOLDER
    return f"rows_{first}-{first + _ROWS_A_FOLDER}/data_{row}.ckpt"


def _body(tokens: int, shape: Shape) -> Body:
    aux, final = tuple(shape.planes[:-1]), shape.planes[-1]
    return {
        "input_ids": ids(tokens),
        "loss_mask": mask(tokens),
        "aux_hidden_state": Field("aux", (1, tokens, len(aux) * shape.hidden_size), shape.dtype, aux),
        "hidden_state": Field(final, (1, tokens, shape.hidden_size), shape.dtype, (final,)),
    }


_FILES = TorchFile(_body)
file_bytes, lay_out, complete, check, planes, load = (
    _FILES.file_bytes, _FILES.lay_out, _FILES.complete, _FILES.check, _FILES.planes, _FILES.load,
)  # fmt: skip


def side_files(folder: Path, rows: Iterable[Row], facts: dict[str, Any]) -> None:
    """SpecForge wants nothing beside the samples; ``data_config.json`` tells people what they hold."""
    write_text(folder / "data_config.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")


def side_bytes(samples: int, tokens: int) -> int:
    """Room for ``data_config.json``."""
    return 1 << 14


def side_wrong(folder: Path, listed: Mapping[int, Listed], deep: bool) -> list[str]:
    """Its reader goes by the samples alone."""
    return []
