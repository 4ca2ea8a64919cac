"""The final norm that is kept beside a data set: applied exactly, and undone as far as numbers allow.

The next-token proof judges samples by it, so it must be right itself: its hash is kept beside it.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.errors import BadInput, Refused
from hsx_host.head import rounded, widen
from hsx_host.state import write_text, write_whole

NORM_FILE = "final_norm.safetensors"
_HASH = ".sha256"
FILES = (NORM_FILE, str(Path(NORM_FILE).with_suffix(_HASH)))
_PLAIN_NORMS = ("RMSNorm", "LlamaRMSNorm", "Qwen3RMSNorm")


def keep_norm(spool: Path, norm_class: str, dataset: Path) -> Path:
    """Put the norm that the plugin saw beside the data set, anew where it was damaged since; Refused where the data set
    was made with another one."""
    if norm_class not in _PLAIN_NORMS:
        raise Refused(
            "the model's final norm is no plain RMSNorm, so its formula is not known here",
            field="model.path",
            value=norm_class,
            fix="use a model with RMSNorm",
        )
    data, kept = (spool / NORM_FILE).read_bytes(), dataset / NORM_FILE
    digest = hashlib.sha256(data).hexdigest()
    there = kept.read_bytes() if kept.exists() else b""
    known = {_kept_hash(kept)} | ({hashlib.sha256(there).hexdigest()} if _is_norm(there) else set())
    if known != {""} and digest not in known:
        raise Refused(
            "the server's final norm differs from the one that the data set was made with",
            field=NORM_FILE,
            value=kept,
            fix="the weights have changed: give the data set another data.name",
        )
    _keep(data, kept)
    return kept


def copy(source: Path, folder: Path) -> None:
    """Put a kept norm into another folder of samples too; Refused where it is gone or damaged itself."""
    _keep(read(source), folder / NORM_FILE)


def _keep(data: bytes, kept: Path) -> None:
    digest = hashlib.sha256(data).hexdigest()
    if damage(kept) or _kept_hash(kept) != digest:
        write_whole(kept, data)
        write_text(kept.with_suffix(_HASH), digest + "\n")


def damage(file: Path) -> str:
    """Why a kept norm can't be used: it is gone, or is not what was kept. Empty where it can. Where nobody wrote its
    hash down (data sets of earlier versions), it only has to be a norm."""
    return _look(file)[1]


def read(file: Path) -> bytes:
    """The bytes of a kept norm; Refused where it is gone or damaged."""
    data, why = _look(file)
    if why:
        raise _unusable(file, why)
    return data


def _look(file: Path) -> tuple[bytes, str]:
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        return b"", "is gone"
    known = _kept_hash(file)
    good = known == hashlib.sha256(data).hexdigest() if known else _is_norm(data)
    return data, "" if good else "is damaged"


def _is_norm(data: bytes) -> bool:
    try:
        _parsed(data)
    except Exception:
        return False
    return True


def _parsed(data: bytes) -> tuple[NDArray[np.float32], np.float32]:
    """Weight and eps; raises whatever the reader does where they are not there."""
    from safetensors import deserialize

    kept = dict(deserialize(data))
    eps = np.frombuffer(kept["eps"]["data"], "<f8")[0]
    return widen(kept["weight"]["data"], kept["weight"]["dtype"]), np.float32(eps)


def _unusable(file: Path, why: str) -> Refused:
    return Refused(
        f"the final norm {why}; no sample is judged by it",
        field=NORM_FILE,
        value=file,
        fix="extract any shard of the data set again, a whole one too: it takes the norm from the server; where "
        "convert made the folder, convert to it again",
    )


def _kept_hash(file: Path) -> str:
    try:
        return file.with_suffix(_HASH).read_text(errors="replace").strip()
    except FileNotFoundError:
        return ""


class FinalNorm:
    """RMSNorm with the weight and eps of ``final_norm.safetensors``, in float32, rounded to the data set's dtype."""

    def __init__(self, file: Path, dtype: str = "bfloat16") -> None:
        data = read(file)
        try:
            self.weight, self.eps = _parsed(data)
        except Exception as e:
            raise _unusable(file, f"can't be read: {e}") from None
        self._dtype = dtype

    def rows(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """before -> after: x / sqrt(mean(x^2) + eps) * weight, float32 [..., H], rounded to the data set's dtype.

        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), formula 4 with eps under the root, as
        Llama's models and SGLang's ``RMSNorm.forward_native`` have it.
        """
        scale = 1 / np.sqrt(np.square(x).mean(-1, keepdims=True, dtype=np.float32) + self.eps)
        return rounded(x * scale * self.weight, self._dtype)

    def apply(self, final: Any) -> Any:
        """``rows`` of a torch tensor of the data set's dtype."""
        return self._as_torch(self.rows(final.float().numpy()))

    def undo(self, normed: Any) -> Any:
        """after -> before, but for each row's length, which the norm has thrown away: y / weight, a torch tensor.

        The norm of the result is ``normed`` again within rounding (1.2 % of an element in bfloat16 at most), since the
        norm does not see a row's length: that is all that a trainer does with it. A reader of the lengths is misled.

        :raises BadInput: where the weight has a zero, whose elements are gone.
        """
        if not self.weight.all():
            raise BadInput("the norm's weight has zeros: it can't be undone", field=NORM_FILE, fix="extract again")
        return self._as_torch(rounded(normed.float().numpy() / self.weight, self._dtype))

    def looks_normed(self, rows: NDArray[np.float32]) -> bool:
        """Whether rows [n, H] are after this norm already: then each row's root mean square of y / weight is 1.

        Rows before the norm have lengths of their own, which differ by row and from 1 (bf16 moves it by 0.2 %).
        """
        weight = np.where(self.weight == 0, np.float32(1), self.weight)
        lengths = np.sqrt(np.square(rows / weight).mean(-1))
        return bool((np.abs(lengths - 1) < 0.02).all())

    def _as_torch(self, values: NDArray[np.float32]) -> Any:
        import torch

        return torch.from_numpy(values).to(getattr(torch, self._dtype))
