"""What a sample's file holds, told once and used by every container: ids, mask, and hidden states by plane."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

ITEM_BYTES = {"int64": 8, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Field:
    """One tensor of a file: row-major, its name in checksums, and what stands in it.

    ``holds``: ``("input_ids",)``, ``("loss_mask",)``, or names of planes that lie side by side in each row.
    """

    record: str
    shape: tuple[int, ...]
    dtype: str
    holds: tuple[str, ...]

    @property
    def elements(self) -> int:
        return prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_BYTES[self.dtype]

    @property
    def is_text(self) -> bool:
        """Ids or mask: known before the capture."""
        return self.holds[0] in ("input_ids", "loss_mask")


def ids(tokens: int, record: str = "input_ids") -> Field:
    """The token ids, int64 [tokens]."""
    return Field(record, (tokens,), "int64", ("input_ids",))


def mask(tokens: int) -> Field:
    """The loss mask, int64 [tokens], 1 where the loss counts."""
    return Field("loss_mask", (tokens,), "int64", ("loss_mask",))
