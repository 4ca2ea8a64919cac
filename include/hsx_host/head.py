"""The language model's head, read block by block without torch: which file and tensor it is, and its rows as float32.

The client proves next tokens with it at a shard's end, beside a server that needs the memory: torch alone is half a
gigabyte, and a mapped head of a large vocabulary counts as gigabytes more.
Source of the layout: safetensors' own README (8 bytes of little-endian length, a JSON header, then the data).
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hsx_host.errors import BadInput, Refused
from hsx_host.model_facts import header, read_model

_HEADS = ("lm_head.weight",)
_EMBEDDINGS = ("embed_tokens.weight",)
_ITEM_BYTES = {"BF16": 2, "F16": 2, "F32": 4}


class Head:
    """``shape`` is (vocabulary, hidden). Holds a file descriptor and nothing else.

    :raises Refused: where the head is stored in a dtype other than BF16, F16 and F32.
    """

    def __init__(self, model: Path) -> None:
        file, name = find_head(model)
        start, tensors = header(file)
        entry = tensors[name]
        self.dtype = str(entry["dtype"])
        if self.dtype not in _ITEM_BYTES:
            raise Refused(
                f"the head is stored as {self.dtype}: the next token can't be recomputed",
                field="model.path",
                value=file,
            )
        self.shape = (int(entry["shape"][0]), int(entry["shape"][1]))
        self.row_bytes = self.shape[1] * _ITEM_BYTES[self.dtype]
        self._start = start + int(entry["data_offsets"][0])
        self._file = file.open("rb")

    def rows(self, first: int, end: int) -> NDArray[np.float32]:
        """Rows [first, end) as float32 [end - first, hidden]."""
        size = (end - first) * self.row_bytes
        data = os.pread(self._file.fileno(), size, self._start + first * self.row_bytes)
        if len(data) != size:
            raise OSError(f"{self._file.name} ends inside the head")
        return widen(data, self.dtype).reshape(end - first, self.shape[1])


def find_head(model: Path) -> tuple[Path, str]:
    """File and tensor name of lm_head, or of the embedding that it is tied to. Reads headers and the index only."""
    index = model / "model.safetensors.index.json"
    names: dict[str, Path] = {}
    if index.exists():
        names = {name: model / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    else:
        for file in sorted(model.glob("*.safetensors")):
            names |= dict.fromkeys(header(file)[1], file)
    wanted = _EMBEDDINGS if read_model(model).tie_word_embeddings else _HEADS
    # a draft or vision part may have a head of its own: the shortest path belongs to the language model
    found = sorted((n for n in names if n.endswith(wanted)), key=lambda n: (n.count("."), n))
    if not found:
        raise BadInput(f"the weights hold no {wanted[0]}", field="model.path", value=model, fix="give the whole model")
    return names[found[0]], found[0]


def widen(data: bytes, dtype: str) -> NDArray[np.float32]:
    """Bytes of BF16, F16 or F32 as float32, flat. BF16 is the upper half of a float32."""
    if dtype == "BF16":
        wide = np.frombuffer(data, "<u2").astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    return np.frombuffer(data, "<f2" if dtype == "F16" else "<f4").astype(np.float32)


def rounded(x: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """Rounded to ``bfloat16`` or ``float16``, to nearest and ties to even, and widened again. Finite values only."""
    if dtype == "float16":
        return x.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)
