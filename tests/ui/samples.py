"""Pre-tokenised samples for a tiny model: enough of them that a shard takes a while on a CPU."""

from __future__ import annotations

import json
import random
from pathlib import Path


def write_chats(path: Path, count: int = 360, seed: int = 7) -> Path:
    """``count`` samples of 100 to 1,400 random tokens."""
    rng = random.Random(seed)
    with path.open("w") as f:
        for _ in range(count):
            n = rng.randrange(100, 1400)
            f.write(json.dumps({"input_ids": [rng.randrange(4, 512) for _ in range(n)], "loss_mask": [1] * n}) + "\n")
    return path
