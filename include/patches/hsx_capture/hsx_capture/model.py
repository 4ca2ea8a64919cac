"""The live model: where its layers are captured, and what its final norm is.

SGLang's setters number layers differently (llama-style adds 1, deepseek-style sometimes), so the setter is called for
its flags only and the list itself is then set and read back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


class SeamError(RuntimeError):
    """The running SGLang or its model does not have the shape that capture needs."""


@dataclass(frozen=True)
class Target:
    """A model with capture on. ``owner`` holds the logits processor, ``inner`` the blocks and the final norm."""

    owner: Any
    inner: Any
    num_blocks: int
    hidden_size: int
    norm_eps: float

    def layers_now(self) -> list[int]:
        """What stands in ``layers_to_capture`` now, ascending."""
        return sorted(self.inner.layers_to_capture)


def find(model: Any) -> Target:
    """Find the language model inside ``model``; raises SeamError where it has no seam for auxiliary hidden states."""
    for candidate in (model, getattr(model, "language_model", None)):
        owner: Any = candidate
        inner: Any = getattr(owner, "model", None)
        if all(hasattr(inner, name) for name in ("layers", "norm", "layers_to_capture")) and all(
            hasattr(owner, name) for name in ("set_eagle3_layers_to_capture", "logits_processor")
        ):
            eps, hidden = _rms_norm(inner.norm)
            return Target(owner, inner, len(inner.layers), hidden, eps)
    raise SeamError(
        f"{type(model).__name__} has no inner model with layers, norm and layers_to_capture (looked at .model and "
        ".language_model.model): SGLang can't capture its auxiliary hidden states"
    )


def set_layers(target: Target, layers: list[int]) -> None:
    """Make the model capture exactly ``layers`` (k: the stream that enters block k), and prove that it does.

    :raises SeamError: where a layer is out of range, or the model does not take the list.
    """
    n = target.num_blocks
    if not layers or layers != sorted(set(layers)) or layers[0] < 1 or layers[-1] >= n:
        raise SeamError(
            f"CaptureSpec.layers = {layers}: expected ascending layers from 1 to {n - 1} of a model with {n} blocks "
            f"(the stream after block {n - 1} is the final hidden state, which is always captured)"
        )
    owner, inner = target.owner, target.inner
    owner.set_eagle3_layers_to_capture([k - 1 for k in layers])
    inner.layers_to_capture = type(inner.layers_to_capture)(layers)
    marked = [layer for layer in inner.layers if hasattr(layer, "_is_layer_to_capture")]
    if marked:  # some models ask each block's own mark instead of the list
        for i, layer in enumerate(inner.layers):
            layer._is_layer_to_capture = i in layers
    if target.layers_now() != layers:
        raise SeamError(f"layers_to_capture reads back as {target.layers_now()}, expected {layers}")
    if not getattr(owner, "capture_aux_hidden_states", False):
        raise SeamError(f"{type(owner).__name__}.capture_aux_hidden_states is not on after its setter was called")


def _rms_norm(norm: Any) -> tuple[float, int]:
    """Epsilon and hidden size of a plain RMSNorm; raises SeamError for any other norm."""
    name = type(norm).__name__
    weight, eps = getattr(norm, "weight", None), getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    plain = any(c.__name__.endswith("RMSNorm") and "Gemma" not in c.__name__ for c in type(norm).__mro__)
    if not plain or "Gemma" in name or not isinstance(weight, torch.Tensor) or weight.dim() != 1 or eps is None:
        raise SeamError(f"the final norm is a {name}: expected an RMSNorm with a weight and an epsilon")
    return float(eps), int(weight.shape[0])


def prove_norm(target: Target, dtype: torch.dtype, device: torch.device) -> float:
    """Check on random rows that the norm is ``x / sqrt(mean(x^2) + eps) * weight``; answers the relative error.

    After-norm states are derived with this formula later, so a norm that does something else must be seen here.
    """
    norm = target.inner.norm
    seeded = torch.Generator("cpu").manual_seed(0)
    x = torch.randn(4, target.hidden_size, generator=seeded, device="cpu", dtype=torch.float32)
    x = x.to(device=device, dtype=dtype)
    with torch.no_grad():
        got = norm(x.clone()).float()
        wide = x.float()
        want = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + target.norm_eps) * norm.weight.float()
    error = float((got - want).norm() / want.norm().clamp_min(1e-12))
    if not error < 0.02:
        raise SeamError(
            f"the final norm {type(norm).__name__} is off x / sqrt(mean(x^2) + eps) * weight by {error:.3f} (relative)"
        )
    return error
