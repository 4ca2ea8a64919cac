"""SpecForge offline features: ``rows_<g>-<g+2000>/data_<row>.ckpt``, the final hidden state after the norm.

A dict of ``input_ids`` long [n], ``loss_mask`` long [n], ``aux_hidden_state`` [1, n, L*H] and ``hidden_state``
[1, n, H]. Source: SpecForge 0.2.0, scripts/prepare_hidden_states.py and specforge/data/preprocessing.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hsx_host.formats import Shape

NAME = "specforge"
FOLDER = "specforge"
NORM = "after"

_ROWS_A_FOLDER = 2000


def file_name(row: int) -> str:
    """The file of a row, in its folder of 2000."""
    first = row - row % _ROWS_A_FOLDER
    return f"rows_{first}-{first + _ROWS_A_FOLDER}/data_{row}.ckpt"


def write(path: Path, sample: dict[str, Any], shape: Shape) -> None:
    """Write one sample. ``sample["planes"]``: [n, H] each, the last one after the norm; whole or not at all."""
    import torch

    path.parent.mkdir(parents=True, exist_ok=True)
    body = {
        "input_ids": sample["input_ids"].clone(),
        "loss_mask": sample["loss_mask"].clone(),
        "aux_hidden_state": torch.cat(sample["planes"][:-1], dim=-1).unsqueeze(0),
        "hidden_state": sample["planes"][-1].unsqueeze(0).contiguous(),
    }
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with temporary.open("wb") as f:
        torch.save(body, f)
        f.flush()
        os.fsync(f.fileno())
    temporary.replace(path)


def side_files(folder: Path, lengths: dict[int, int], facts: dict[str, Any]) -> None:
    """SpecForge wants nothing beside the samples; ``dataset.json`` says what they hold."""
    import json

    from hsx_host.state import write_text

    write_text(folder / "dataset.json", json.dumps(facts, indent=2, sort_keys=True) + "\n")
