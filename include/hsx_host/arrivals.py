"""Waiting for files that somebody else renames into a folder: one thread looks, however many wait.

Each waiting thread that looked for itself would take the interpreter's lock twenty times a second, and with hundreds of
samples in flight leave little of it to those that work.
"""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

_LOOK_S = 0.003


class Arrivals:
    """Names that appear in ``folder``. Safe for many threads; its own thread lives while anyone waits."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock = threading.Lock()
        self._waiting: dict[str, threading.Event] = {}
        self._looking = False

    def wait(self, name: str, timeout_s: float) -> bool:
        """Whether a file of this name is there by then. One thread at a time waits for a name."""
        there = threading.Event()
        with self._lock:
            self._waiting[name] = there
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="hsx-arrivals", daemon=True).start()
        if there.wait(timeout_s):
            return True
        with self._lock:
            return self._waiting.pop(name, None) is None

    def _look(self) -> None:
        while True:
            try:
                there = set(os.listdir(self._folder))
            except OSError:
                there = set()  # the folder goes with its server: whoever waits asks about that
            with self._lock:
                for name in there & self._waiting.keys():
                    self._waiting.pop(name).set()
                if not self._waiting:
                    self._looking = False
                    return
            time.sleep(_LOOK_S)
