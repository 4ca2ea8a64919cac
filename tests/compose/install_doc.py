"""The commands of docs/install.md."""

from __future__ import annotations

import re
from pathlib import Path

REPO = Path(__file__).resolve().parents[2]


def bash_blocks(heading: str) -> list[str]:
    """The fenced bash blocks of one section of docs/install.md."""
    text = (REPO / "docs" / "install.md").read_text()
    section = re.split(r"^##+ ", text.split(f"\n{heading}\n", 1)[1], maxsplit=1, flags=re.M)[0]
    return re.findall(r"^```bash\n(.*?)^```", section, flags=re.S | re.M)
