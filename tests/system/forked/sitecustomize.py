"""On the path of servers that are started by the dozen: SGLang's children are forked instead of spawned.

A spawned child imports SGLang anew, 13 s of CPU time for each of three processes; the first import is made without
garbage collection (9 s). Processes, sockets and signals are the same, and nothing else is changed. The lifecycle's
tests, the demo and two hosts start servers as SGLang does.
"""

from __future__ import annotations

import gc
import multiprocessing

_given = multiprocessing.set_start_method


def _forked(method: str | None, force: bool = False) -> None:
    gc.enable()
    _given("fork" if method == "spawn" else method, force=force)


gc.disable()
multiprocessing.set_start_method = _forked
