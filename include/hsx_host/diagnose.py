"""Says which fault a data set has that its checksums can't see: it was made wrong, and says of itself that it is right.

``ids`` and ``norm`` are cheap and belong to every ``verify``: token ids against the plan's, and whether the final
hidden state is on the promised side of the norm. ``against_reference`` runs short samples through Hugging Face
transformers and tells which layer each plane really holds; it loads the whole model, so it is asked for.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.checksum import crc32
from hsx_host.converted import Collection
from hsx_host.errors import BadInput
from hsx_host.head import widen
from hsx_host.layouts.fields import ITEM_BYTES
from hsx_host.manifest import Published
from hsx_host.norm import FinalNorm
from hsx_host.shards import ShardInput

_STORED = {"bfloat16": "BF16", "float16": "F16"}
_ENOUGH_ROWS = 8  # fewer may have a length of 1 by chance
_MOST_TOKENS, _LEAST_TOKENS = 512, 4
# bf16 through all blocks moves a row by 0.001 to 0.05 of its length; a neighbouring layer of a trained model differs by
# 0.1 and more, rows of another sample by about 1. Half a neighbour's distance tells them apart, whatever the model.
_SAME, _OTHER_ROWS = 0.5, 0.7


def ids(one: Collection, given: ShardInput) -> dict[int, str]:
    """Why by row: the published ids or loss mask are not the plan's. Reads a file only where its checksum differs."""
    wrong = {}
    for i in range(len(given)):
        sample = given.sample(i)
        line = one.lines.get(sample.row)
        if line is None:
            continue
        known = line.crc32.get("input_ids", line.crc32.get("token_ids"))
        if known == _crc(sample.ids):
            if line.crc32["loss_mask"] != _crc(sample.mask):
                wrong[sample.row] = "holds another loss mask than the data file"
            continue
        try:
            there = one.form.load(one.base / line.file, one.shape)["input_ids"].numpy()
        except (OSError, ValueError, RuntimeError):
            continue  # a damaged file is told elsewhere
        wrong[sample.row] = f"holds other token ids than the data file{_shift(there, sample.ids)}"
    return wrong


def _crc(values: NDArray[Any]) -> int:
    """Of ids or a mask as every format holds them."""
    return int(crc32(np.ascontiguousarray(values, dtype="<i8").tobytes()))


def _shift(there: NDArray[Any], wanted: NDArray[Any]) -> str:
    if len(there) == len(wanted) > 1:
        if (there[:-1] == wanted[1:]).all():
            return ": they are shifted by one, the first is missing"
        if (there[1:] == wanted[:-1]).all():
            return ": they are shifted by one, the last is missing"
    return ""


def norm(one: Collection, lines: Iterable[Published]) -> str:
    """Why the final hidden state is on the wrong side of the norm; empty where it is right, or too short to tell."""
    rule = FinalNorm(one.norm_file, one.meaning.dtype)
    rows: list[NDArray[np.float32]] = []
    for line in lines:
        try:
            rows.append(_final_rows(one, line))
        except (OSError, ValueError):
            continue
    if sum(map(len, rows)) < _ENOUGH_ROWS:
        return ""
    normed = rule.looks_normed(np.concatenate(rows))
    if normed and one.final == "before_norm":
        return "the final hidden state is after the norm, dataset.json says before: each row has the norm's own length"
    if not normed and one.final == "after_norm":
        return "the final hidden state is before the norm, dataset.json says after: rows have lengths of their own"
    return ""


def _final_rows(one: Collection, line: Published, most: int = 64) -> NDArray[np.float32]:
    """Up to ``most`` rows of the final plane, float32 [k, H]."""
    place = one.form.planes(one.base / line.file, line.tokens, one.shape)[-1]
    size = one.shape.hidden_size * ITEM_BYTES[one.shape.dtype]
    with (one.base / line.file).open("rb") as f:
        parts = [os.pread(f.fileno(), size, place.offset + r * place.row_stride) for r in range(min(most, line.tokens))]
    return widen(b"".join(parts), _STORED[one.shape.dtype]).reshape(-1, one.shape.hidden_size)


def against_reference(one: Collection, count: int, *, trust_remote_code: bool = False) -> dict[int, str]:
    """Why by row: planes that are not what they are called, of the ``count`` shortest samples that are long enough.

    :raises BadInput: where transformers or the model can't be loaded.
    """
    fit = [line for line in one.lines.values() if _LEAST_TOKENS <= line.tokens <= _MOST_TOKENS]
    lines = sorted(fit, key=lambda line: (line.tokens, line.index))[:count]
    model = _Reference(one.meaning.model_path, trust_remote_code) if lines else None
    wrong = {}
    for line in lines:
        assert model is not None
        sample = one.form.load(one.base / line.file, one.shape)
        states, before = model.states(sample["input_ids"])
        planes = [plane.float().numpy() for plane in sample["planes"]]
        found = [_layer(k, plane, states) for k, plane in zip(one.meaning.layers, planes[:-1], strict=True)]
        found.append(_final(planes[-1], before, states[-1], one.final))
        if told := [text for text in found if text]:
            wrong[line.index] = "; ".join(told)
    return wrong


def _layer(k: int, plane: NDArray[Any], states: Sequence[NDArray[Any]]) -> str:
    """What is wrong with the plane that is called layer k; ``states[j]`` enter block j."""
    off = [_off(plane, state) for state in states[:-1]]
    best = int(np.argmin(off))
    if best == k:
        return "" if off[k] < _SAME else f"layer_{k}: {_rows(plane, states[k])}"
    if off[best] < _SAME and off[best] < off[k] / 2:
        way = f"off by {best - k:+d}" if abs(best - k) == 1 else "another layer, or the order is swapped"
        return f"layer_{k} holds what enters block {best} ({way})"
    return f"layer_{k}: {_rows(plane, states[k])}" if off[k] >= _SAME else ""


def _final(plane: NDArray[Any], before: NDArray[Any], after: NDArray[Any], final: str) -> str:
    wanted, other = (before, after) if final == "before_norm" else (after, before)
    if _off(plane, wanted) < _SAME and _off(plane, wanted) <= _off(plane, other):
        return ""
    if _off(plane, other) < _SAME:
        side = "after" if final == "before_norm" else "before"
        return f"final is {side} the norm, dataset.json says {final.replace('_', ' ')}"
    return f"final: {_rows(plane, wanted)}"


def _rows(plane: NDArray[Any], wanted: NDArray[Any]) -> str:
    """Why rows don't fit: shifted, in another order, or of something else."""
    if _off(plane[1:], wanted[:-1]) < _SAME or _off(plane[:-1], wanted[1:]) < _SAME:
        return "its rows are shifted by one against the token ids"
    unit = plane / np.linalg.norm(plane, axis=-1, keepdims=True).clip(1e-9)
    other = wanted / np.linalg.norm(wanted, axis=-1, keepdims=True).clip(1e-9)
    nearest = (unit @ other.T).argmax(-1)
    if _off(plane, wanted[nearest]) < _SAME:
        return "its rows are in another order than the token ids"
    return f"its rows are of other tokens, or of another model (off by {_off(plane, wanted):.2f})"


def _off(a: NDArray[Any], b: NDArray[Any]) -> float:
    """The median over rows of ||a - b|| / ||b||: a first token's huge row does not hide the others."""
    return float(np.median(np.linalg.norm(a - b, axis=-1) / np.linalg.norm(b, axis=-1).clip(1e-9)))


class _Reference:
    """The model in transformers, on the CPU, in its own dtype."""

    def __init__(self, path: str, trust_remote_code: bool) -> None:
        try:
            import transformers

            self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                path, dtype="auto", local_files_only=True, trust_remote_code=trust_remote_code
            ).eval()
        except (ImportError, OSError, ValueError) as e:
            raise BadInput(
                f"the reference model can't be loaded: {e}", field="--reference", value=Path(path),
                fix="verify without it; the proof of next tokens needs the head alone",
            ) from None  # fmt: skip
        self._final: Any = None
        base = self._model.model
        getattr(base, "norm", None).register_forward_pre_hook(self._keep)  # type: ignore[union-attr]

    def states(self, token_ids: Any) -> tuple[list[NDArray[Any]], NDArray[Any]]:
        """``hidden_states`` (the last after the norm) and the final before the norm, float32 [n, H] each."""
        import torch

        with torch.no_grad():
            out = self._model.model(token_ids.reshape(1, -1), output_hidden_states=True, use_cache=False)
        return [t[0].float().numpy() for t in out.hidden_states], self._final[0].float().numpy()

    def _keep(self, module: Any, args: Any) -> None:
        self._final = args[0]
