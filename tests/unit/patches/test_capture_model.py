"""Layers and norm against SGLang's own setters and norms.

The setters are the real functions of the real classes; the object that they set is a stand-in with the same
attributes, because deepseek-style models don't run without a GPU.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hsx_capture import model

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def norms() -> Any:
    from sglang.srt.layers import layernorm

    return layernorm


def owner(cls: type, norm: Any, blocks: int = 61, hidden: int = 8, **marks: Any) -> Any:
    """An object with a real model class's setter and a stand-in's attributes."""
    layers = [SimpleNamespace(**marks) for _ in range(blocks)]
    inner = SimpleNamespace(layers=layers, norm=norm, layers_to_capture=[])

    class Owner:
        set_eagle3_layers_to_capture = cls.set_eagle3_layers_to_capture  # type: ignore[attr-defined]

        def __init__(self) -> None:
            self.model, self.logits_processor = inner, None
            self.pp_group = SimpleNamespace(is_last_rank=True)
            self.config = SimpleNamespace(num_hidden_layers=blocks)
            self.capture_aux_hidden_states = False

    return Owner()


def deepseek() -> type:
    from sglang.srt.models.deepseek_v2 import DeepseekV2ForCausalLM

    return DeepseekV2ForCausalLM  # type: ignore[no-any-return]


def llama() -> type:
    from sglang.srt.models.llama import LlamaForCausalLM

    return LlamaForCausalLM  # type: ignore[no-any-return]


@pytest.mark.parametrize("family", [llama, deepseek])
@pytest.mark.parametrize("layers", [[3, 31, 59], [1, 30, 60], [2, 30, 58]])
def test_each_setter_ends_with_exactly_the_asked_layers(family: Any, layers: list[int], norms: Any) -> None:
    target = model.find(owner(family(), norms.RMSNorm(8)))
    model.set_layers(target, layers)
    assert target.inner.layers_to_capture == layers
    assert target.owner.capture_aux_hidden_states is True


def test_a_multimodal_wrapper_is_looked_through(norms: Any) -> None:
    language = owner(deepseek(), norms.RMSNorm(8, eps=1e-5))
    target = model.find(SimpleNamespace(language_model=language))
    assert (target.owner, target.num_blocks, target.hidden_size, target.norm_eps) == (language, 61, 8, 1e-5)


def test_marks_on_the_blocks_follow_the_list(norms: Any) -> None:
    target = model.find(owner(llama(), norms.RMSNorm(8), blocks=6, _is_layer_to_capture=True))
    model.set_layers(target, [2, 4])
    assert [i for i, layer in enumerate(target.inner.layers) if layer._is_layer_to_capture] == [2, 4]


@pytest.mark.parametrize("layers", [[], [0, 2], [2, 6], [4, 2], [2, 2]])
def test_layers_out_of_range_are_refused(layers: list[int], norms: Any) -> None:
    target = model.find(owner(llama(), norms.RMSNorm(8), blocks=6))
    with pytest.raises(model.SeamError, match="expected ascending layers from 1 to 5 of a model with 6 blocks"):
        model.set_layers(target, layers)


def test_a_setter_that_turns_nothing_on_is_seen(norms: Any) -> None:
    found = owner(llama(), norms.RMSNorm(8))
    found.pp_group.is_last_rank = False  # SGLang's setter does nothing then
    with pytest.raises(model.SeamError, match="capture_aux_hidden_states is not on"):
        model.set_layers(model.find(found), [3])


def test_a_model_without_the_seam_is_named() -> None:
    with pytest.raises(model.SeamError, match="SimpleNamespace has no inner model"):
        model.find(SimpleNamespace(model=SimpleNamespace(layers=[], norm=None)))


def test_other_norms_are_refused(norms: Any) -> None:
    for norm in (norms.GemmaRMSNorm(8), torch.nn.LayerNorm(8), norms.RMSNormWithoutScale(8)):
        with pytest.raises(model.SeamError, match=f"the final norm is a {type(norm).__name__}"):
            model.find(owner(llama(), norm))


def test_the_norms_formula_is_proved(norms: Any) -> None:
    norm = norms.RMSNorm(64, eps=1e-5).to(torch.bfloat16)
    with torch.no_grad():
        norm.weight.copy_(torch.rand(64) + 0.5)
    target = model.find(owner(llama(), norm))
    assert model.prove_norm(target, torch.bfloat16, torch.device("cpu")) < 0.01

    class Shifted(norms.RMSNorm):  # type: ignore[name-defined, misc]
        def forward(self, x: torch.Tensor, *args: Any) -> Any:
            return super().forward(x, *args) + 0.5

    odd = Shifted(64).to(torch.bfloat16)
    with pytest.raises(model.SeamError, match="Shifted is off"):
        model.prove_norm(model.find(owner(llama(), odd)), torch.bfloat16, torch.device("cpu"))
