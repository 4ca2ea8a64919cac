"""Real SGLang on the CPU with an EAGLE-3 drafter: it loads what hsx writes, and answers as the target alone does."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import models
import pytest
import sglang_server

from hsx_host import acceptance, drafter
from hsx_host import contract as c

LAYERS = [2, 4, 6]


def random_drafter(model: Path, folder: Path) -> Path:
    """A drafter of the target's shape that has learned nothing, with the config that hsx writes."""
    import torch
    from safetensors.torch import save_file

    given = c.HandoffResult(
        path="", profile="", dataset_id="", dataset_dir="", samples=0, tokens=0, bytes=0, formats={}, layers=LAYERS,
        final="", layer_ids={}, norm={}, model={"path": str(model), "architecture": "LlamaForCausalLM"}, engine={},
        manifest_sha256="", commands={},
    )  # fmt: skip
    config: dict[str, Any] = drafter.sglang_config(model, given, vocabulary=0)
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q, kv = (config[k] * config["head_dim"] for k in ("num_attention_heads", "num_key_value_heads"))
    shapes = {
        "fc": (hidden, 3 * hidden), "layers.0.self_attn.q_proj": (q, 2 * hidden),
        "layers.0.self_attn.k_proj": (kv, 2 * hidden), "layers.0.self_attn.v_proj": (kv, 2 * hidden),
        "layers.0.self_attn.o_proj": (hidden, q), "layers.0.mlp.gate_proj": (inner, hidden),
        "layers.0.mlp.up_proj": (inner, hidden), "layers.0.mlp.down_proj": (hidden, inner),
        "lm_head": (config["vocab_size"], hidden),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    weights = {f"{n}.weight": (torch.randn(s, generator=generator) * 0.05).bfloat16() for n, s in shapes.items()}
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        weights[f"layers.0.{name}.weight"] = torch.ones(hidden).bfloat16()
    weights["norm.weight"] = torch.ones(hidden).bfloat16()
    folder.mkdir()
    save_file(weights, folder / drafter.WEIGHTS)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.slow
def test_answers_with_a_drafter_are_the_targets_own(tiny_llama: Path, tmp_path: Path) -> None:
    """Whatever the drafter says: a chain that is verified wrongly, or layers that aren't there, would change them."""
    port = sglang_server.free_port()
    env = {"PYTHONPATH": str(sglang_server.CPU), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
           "TORCHDYNAMO_DISABLE": "1"}  # fmt: skip
    args = ["--model-path", str(tiny_llama), "--host", "127.0.0.1", "--port", str(port), *sglang_server.FLAGS]
    settings = c.AcceptanceSettings(
        server=c.ServerSettings(args, env, "127.0.0.1", port, 600.0, 15.0, 0), output_tokens=24, concurrency=2,
        steps=3, draft_env={"TRITON_INTERPRET": "1"},
    )  # fmt: skip
    chosen = [acceptance.Prompt(i, models.prompt(i, n)) for i, n in enumerate((5, 40, 90))]
    alone = acceptance.serve_and_ask(sys.executable, settings, chosen, "alone", tmp_path)
    with_it = acceptance.with_drafter(settings, random_drafter(tiny_llama, tmp_path / "drafter"))
    drafted = acceptance.serve_and_ask(sys.executable, with_it, chosen, "with the drafter", tmp_path)
    found = acceptance.compare(settings, "", chosen, alone, drafted)
    assert found.drafted.same_output == len(chosen)
    assert found.alone.acceptance_length == 1.0
    assert 1.0 <= found.drafted.acceptance_length < 2.0, "it has learned nothing"
    log = (tmp_path / "server-with-the-drafter.log").read_text(errors="replace")
    assert "LlamaForCausalLMEagle3" in log
