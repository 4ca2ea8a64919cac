"""A model folder for the stand-in: a config and one head of random rows, written without numpy or torch."""

from __future__ import annotations

import json
import random
import struct
from pathlib import Path

BLOCKS, HIDDEN, VOCAB = 8, 16, 512


def make(folder: Path) -> Path:
    """``config.json`` and ``model.safetensors`` with ``lm_head.weight`` [VOCAB, HIDDEN] in float32."""
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"], "num_hidden_layers": BLOCKS, "hidden_size": HIDDEN,
        "vocab_size": VOCAB, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    rng = random.Random(0)
    body = struct.pack(f"<{VOCAB * HIDDEN}f", *(rng.gauss(0, 1) for _ in range(VOCAB * HIDDEN)))
    head = {"lm_head.weight": {"dtype": "F32", "shape": [VOCAB, HIDDEN], "data_offsets": [0, len(body)]}}
    text = json.dumps(head).encode()
    text += b" " * (-len(text) % 8)
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + body)
    return folder


def make_data(file: Path, count: int, seed: int = 3) -> Path:
    """``count`` different samples of 5 to 39 tokens."""
    rng = random.Random(seed)
    rows = [[rng.randrange(4, VOCAB) for _ in range(rng.randrange(5, 40))] for _ in range(count)]
    file.write_text("".join(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n" for ids in rows))
    return file
