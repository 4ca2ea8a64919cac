"""The samples that every trainer's reader gets: every kind that one may stumble over."""

from __future__ import annotations

import json
import random
from pathlib import Path

import models

#: The longest first; one token; two tokens (one is left behind a trainer's shift); a mask without a 1.
LENGTHS = [130, 1, 19, 64, 65, 7, 2, 40]
REJECT, MASKLESS = 3, 6  # rows: a line that is no sample, and one that trains on nothing


def write_data(path: Path) -> Path:
    """LENGTHS as samples, with a broken line at row REJECT."""
    rng = random.Random(5)
    lines = []
    for i, n in enumerate(LENGTHS):
        mask = [0 if i == MASKLESS - 1 else rng.randrange(2) for _ in range(n)]
        lines.append(json.dumps({"input_ids": models.prompt(900 + i, n), "loss_mask": mask}))
    lines.insert(REJECT, "broken")
    path.write_text("\n".join(lines) + "\n")
    return path
