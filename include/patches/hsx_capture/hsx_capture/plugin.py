"""The entry point. It runs in every process of the server, so without a spec it does nothing at all."""

from __future__ import annotations

import os


def load() -> None:
    """Register the seams where ``HSX_CAPTURE_SPEC`` is set; return at once, importing nothing, where it is not."""
    path = os.environ.get("HSX_CAPTURE_SPEC", "")
    if path:
        from hsx_capture import seams

        seams.register(path)
