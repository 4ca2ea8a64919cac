"""A trained drafter as SGLang serves it: weights, and a ``config.json`` with the layers in SGLang's own numbers.

speculators' checkpoints nest the block's shape and name layers as vLLM does; SGLang reads a flat
``LlamaForCausalLMEagle3``. The tensors have the same names and shapes (SGLang 0.5.23, models/llama_eagle3.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
from pathlib import Path
from typing import Any

from hsx_host import state
from hsx_host.contract import HandoffResult
from hsx_host.errors import BadInput

WEIGHTS = "model.safetensors"
_SHAPE = (
    "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps",
    "vocab_size", "max_position_embeddings", "hidden_act", "bos_token_id", "eos_token_id", "rope_theta", "rope_scaling",
    "rope_parameters",
)  # fmt: skip
# Whose ``set_eagle3_layers_to_capture`` takes the ids as they are, unless the first is 1 (SGLang >= #25454; read in
# 0.5.23: deepseek_v2.py, which Kimi-K2.5's text model is, glm4_moe_lite.py). All others add 1.
_VERBATIM = re.compile(r"Deepseek(V2|V3|V32)|DeepSeek|KimiK2|KimiK25|Glm4MoeLite|BailingMoeV3")


def sglang_layer_ids(architecture: str, layers: list[int]) -> list[int]:
    """What ``eagle_aux_hidden_state_layer_ids`` must say, so that SGLang 0.5.23 captures ``layers``.

    :param architecture: the target's, as its config.json names it.
    :param layers: hsx's numbers (k enters block k).
    :raises BadInput: where no list leads there: a verbatim setter adds 1 to a list that begins with 1.
    """
    if not _VERBATIM.match(architecture):
        return [k - 1 for k in layers]
    if layers[0] == 1:
        raise BadInput(
            f"SGLang adds 1 to a list of layers that begins with 1 ({architecture})",
            field="capture.layers",
            value=layers,
            fix="capture from layer 2 on",
        )
    return list(layers)


def sglang_config(model: Path, handoff: HandoffResult, *, vocabulary: int, own: dict[str, Any] | None = None) -> Any:
    """The drafter's config.json for SGLang.

    :param model: the target's folder; its shape is the drafter's where ``own`` does not say otherwise.
    :param vocabulary: the draft vocabulary; 0 for the whole.
    :param own: what the trainer's own config says of the block and its norms.
    """
    whole = json.loads((model / "config.json").read_text())
    target = whole.get("text_config") if isinstance(whole.get("text_config"), dict) else whole
    shape = {k: target[k] for k in _SHAPE if target.get(k) is not None}
    own = dict(own or {})
    block = own.pop("transformer_layer_config", {}) or {}
    shape |= {k: block[k] for k in _SHAPE if block.get(k) is not None}
    rope = shape.get("rope_parameters") or {}
    shape.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
    if "rope_parameters" not in shape:
        shape["rope_parameters"] = {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    missing = [k for k in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size") if k not in shape]
    if missing:
        raise BadInput(f"config.json has no {missing[0]}", field="model.path", value=model, fix="name a whole model")
    shape["head_dim"] = shape.get("head_dim") or shape["hidden_size"] // shape["num_attention_heads"]
    ids = sglang_layer_ids(handoff.model.get("architecture", ""), handoff.layers)
    return shape | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "draft_vocab_size": vocabulary or shape["vocab_size"],
        "norm_output": bool(own.get("norm_output", False)),
        "fc_norm": bool(own.get("fc_norm", False)),
        "norm_before_fc": bool(own.get("norm_before_fc", False)),
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": ids,
            "use_aux_hidden_state": True,
            "norm_before_fc": bool(own.get("norm_before_fc", False)),
        },
    }


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint to serve: speculators' ``checkpoint_best``, else the highest number that is whole."""
    best = folder / "checkpoint_best"
    if (best / WEIGHTS).exists():
        return best.resolve()
    found = [p for p in folder.glob("*") if p.name.isdigit() and (p / WEIGHTS).exists()]
    return max(found, key=lambda p: int(p.name)) if found else None


def make_servable(checkpoint: Path, out: Path, handoff: HandoffResult) -> Path:
    """A folder that SGLang loads: ``checkpoint`` itself where it is one, else ``out`` with a config made for it.

    :raises BadInput: for a checkpoint of another kind, or one whose block SGLang does not have.
    """
    try:
        config = json.loads((checkpoint / "config.json").read_text())
    except (OSError, ValueError) as e:
        raise BadInput(f"its config.json can't be read: {e}", field="drafter", value=checkpoint) from None
    ids = sglang_layer_ids(handoff.model.get("architecture", ""), handoff.layers)
    if "LlamaForCausalLMEagle3" in config.get("architectures", []):
        wanted = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        made = config | {"eagle_config": {**(config.get("eagle_config") or {}), **wanted}}
    elif config.get("speculators_model_type") == "eagle3":
        _check_speculators(config, checkpoint, handoff)
        made = sglang_config(
            Path(handoff.model["path"]), handoff, vocabulary=int(config["draft_vocab_size"]), own=config
        )
    else:
        raise BadInput(
            "is neither a drafter of speculators nor of SGLang",
            field="drafter",
            value=checkpoint,
            fix="give the folder of an EAGLE-3 checkpoint, or add an export to training.command",
        )
    if made == config:
        return checkpoint
    out.mkdir(parents=True, exist_ok=True)
    state.write_text(out / "config.json", json.dumps(made, indent=1) + "\n")
    for path in checkpoint.glob("*.safetensors"):
        link = out / path.name
        temporary = out / f".{path.name}.{os.getpid()}.tmp"
        temporary.symlink_to(path.resolve())
        temporary.replace(link)
    return out


def _check_speculators(config: dict[str, Any], checkpoint: Path, handoff: HandoffResult) -> None:
    if config.get("norm_before_residual"):
        raise BadInput(
            "was trained with norm_before_residual, which SGLang's drafter does not have",
            field="drafter",
            value=checkpoint,
            fix="train with --no-norm-before-residual",
        )
    if config.get("norm_before_fc") and not _sglang_has("norm_before_fc"):
        raise BadInput(
            "was trained with norm_before_fc, which this SGLang would leave out without a word",
            field="drafter",
            value=checkpoint,
            fix="serve it with SGLang 0.5.17 or later, or train with fc_norm",
        )
    trained = list(config.get("eagle_aux_hidden_state_layer_ids") or [])
    if trained[: len(handoff.layers)] != handoff.layers:
        raise BadInput(
            f"was trained on the layers {trained}, the data set holds {handoff.layers}",
            field="drafter",
            value=checkpoint,
            fix="train with the hand-off's layers: one off costs acceptance without a word",
        )


def _sglang_has(option: str) -> bool:
    """Whether the drafter's model in the installed SGLang knows ``option``: its source is read, not imported."""
    found = importlib.util.find_spec("sglang")
    folders = (found.submodule_search_locations or []) if found else []
    return any(option in (Path(folder) / "srt/models/llama_eagle3.py").read_text() for folder in folders)
