"""Tiny checkpoints with random weights, small enough to serve on a CPU in seconds.

Shapes are chosen so that every way a layer id can be off by one shows: 8 blocks, hidden 96 (llama) and 64 (qwen3),
bf16, vocabulary 512, untied head. ``transformers`` writes them; nothing is downloaded.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

VOCAB = 512
BLOCKS = {"llama": 8, "qwen3": 6, "qwen3_moe": 6}
HIDDEN = {"llama": 96, "qwen3": 64, "qwen3_moe": 64}
CONTEXT = 2048


def _config(kind: str, context: int) -> Any:
    import transformers

    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN[kind],
        "intermediate_size": 2 * HIDDEN[kind],
        "num_hidden_layers": BLOCKS[kind],
        "max_position_embeddings": context,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        # transformers' default of 0.02 leaves the blocks almost silent beside the embedding: a layer would look
        # like its neighbour, and a test of layer ids could not fail.
        "initializer_range": 0.06,
        "rms_norm_eps": 1e-5,
        "dtype": "bfloat16",
    }
    if kind == "llama":
        return transformers.LlamaConfig(num_attention_heads=6, num_key_value_heads=2, head_dim=16, **common)
    if kind == "qwen3":
        return transformers.Qwen3Config(num_attention_heads=4, num_key_value_heads=2, head_dim=16, **common)
    if kind == "qwen3_moe":
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "decoder_sparse_step": 1}
        return transformers.Qwen3MoeConfig(
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, norm_topk_prob=True, **experts, **common
        )
    raise ValueError(f"no tiny model {kind!r}: {', '.join(BLOCKS)}")


def build(
    kind: str, folder: Path, seed: int = 0, *, context: int = CONTEXT, spoil: dict[int, float] | None = None
) -> Path:
    """Write a random checkpoint of ``kind`` (a key of ``BLOCKS``), with a tokenizer, to ``folder`` and return it.

    :param spoil: values by token id, which then fill the token's row of the embedding.
    """
    import torch
    import transformers

    torch.manual_seed(seed)
    config = _config(kind, context)
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:  # all-ones norms would hide a norm applied twice or not at all
                p.copy_(1.0 + 0.2 * torch.randn(p.shape))
        for token, value in (spoil or {}).items():
            model.get_input_embeddings().weight[token].fill_(value)
    model.save_pretrained(folder)
    _tokenizer(folder)
    return folder


def _tokenizer(folder: Path) -> None:
    """A word-level tokenizer of the whole vocabulary: SGLang wants one, and bench_serving detokenizes with it."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    special = ["<pad>", "<s>", "</s>", "<unk>"]
    vocab = {w: i for i, w in enumerate(special + [f"w{i}" for i in range(len(special), VOCAB)])}
    inner = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    fast.save_pretrained(folder)
    generation = folder / "generation_config.json"
    body = json.loads(generation.read_text()) if generation.exists() else {}
    body.update(bos_token_id=1, eos_token_id=2, pad_token_id=0)
    generation.write_text(json.dumps(body))


def prompt(seed: int, length: int) -> list[int]:
    """A seeded prompt of ``length`` random ids (4 and up: no special tokens)."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(4, VOCAB) for _ in range(length)]
