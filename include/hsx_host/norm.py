"""The final norm that is kept beside a data set: applied exactly, and undone as far as numbers allow."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host.errors import BadInput, TryAgain
from hsx_host.head import rounded, widen

NORM_FILE = "final_norm.safetensors"


class FinalNorm:
    """RMSNorm with the weight and eps of ``final_norm.safetensors``, in float32, rounded to the data set's dtype."""

    def __init__(self, file: Path, dtype: str = "bfloat16") -> None:
        from safetensors import deserialize

        try:
            kept = dict(deserialize(file.read_bytes()))
            self.weight = widen(kept["weight"]["data"], kept["weight"]["dtype"])
            self.eps = np.float32(np.frombuffer(kept["eps"]["data"], "<f8")[0])
        except Exception as e:
            raise TryAgain(f"the final norm can't be read: {e}", field=NORM_FILE, value=file) from None
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
