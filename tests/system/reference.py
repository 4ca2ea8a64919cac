"""The same prompts through Hugging Face transformers: what captured states are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch


class Reference:
    """A model in transformers, on the CPU, in its own dtype."""

    def __init__(self, model: Path) -> None:
        import transformers

        self._model: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype="auto").eval()
        self._final: Any = None
        self._model.model.norm.register_forward_pre_hook(self._keep)

    def states(self, ids: Any) -> tuple[Any, Any]:
        """``hidden_states`` (index k enters block k; the last is after the norm) and the final before the norm."""
        with torch.no_grad():
            found = self._model.model(ids.reshape(1, -1), output_hidden_states=True, use_cache=False)
        return [t[0] for t in found.hidden_states], self._final[0]

    def normed(self, ids: Any) -> Any:
        """The final hidden state after the norm, [n, H]."""
        return self.states(ids)[0][-1]

    def next_logits(self, ids: Any) -> Any:
        """What follows the prompt, float32 [vocabulary]."""
        with torch.no_grad():
            return self._model(ids.reshape(1, -1), use_cache=False).logits[0, -1].float()

    def _keep(self, module: Any, args: Any) -> None:
        self._final = args[0]

    @staticmethod
    def off(a: Any, b: Any) -> float:
        """||a - b|| / ||b|| over all rows."""
        a, b = a.float(), b.float()
        return float((a - b).norm() / b.norm())
