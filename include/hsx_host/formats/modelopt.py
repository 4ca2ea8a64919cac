"""ModelOpt offline samples: ``data_<row>.pt``, the final hidden state after the norm.

A dict of ``input_ids`` long [n], ``hidden_states`` [n, H] (the final), ``aux_hidden_states`` [n, L*H], ``loss_mask``
long [n], ``conversation_id`` (the sample's identity) and ``hidden_states_prenorm`` False. Source: ModelOpt 0.47,
modelopt/torch/speculative/eagle/utils.py (``OfflineSupervisedDataset``), which takes a list of files.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hsx_host.formats import Listed, Row, Shape
from hsx_host.layouts.fields import Field, ids, mask
from hsx_host.layouts.torchfile import IDENTITY, Body, TorchFile
from hsx_host.state import write_text

NAME = "modelopt"
FOLDER = "modelopt"
NORM = "after"
SIDE = ("data_config.json",)


def file_name(row: int) -> str:
    """``data_<row>.pt``."""
    return f"data_{row}.pt"


def _body(tokens: int, shape: Shape) -> Body:
    aux, final = tuple(shape.planes[:-1]), shape.planes[-1]
    return {
        "input_ids": ids(tokens),
        "hidden_states": Field(final, (tokens, shape.hidden_size), shape.dtype, (final,)),
        "aux_hidden_states": Field("aux", (tokens, len(aux) * shape.hidden_size), shape.dtype, aux),
        "loss_mask": mask(tokens),
        "conversation_id": IDENTITY,
        "hidden_states_prenorm": False,
    }


_FILES = TorchFile(_body)
file_bytes, lay_out, complete, check, planes, load = (
    _FILES.file_bytes, _FILES.lay_out, _FILES.complete, _FILES.check, _FILES.planes, _FILES.load,
)  # fmt: skip


def side_files(folder: Path, rows: Iterable[Row], facts: dict[str, Any]) -> None:
    """ModelOpt wants nothing beside the samples; ``data_config.json`` tells people what they hold."""
    write_text(folder / "data_config.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")


def side_bytes(samples: int, tokens: int) -> int:
    """Room for ``data_config.json``."""
    return 1 << 14


def side_wrong(folder: Path, listed: Mapping[int, Listed], deep: bool) -> list[str]:
    """Its reader goes by the samples alone."""
    return []
