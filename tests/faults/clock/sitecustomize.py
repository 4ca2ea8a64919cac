"""A wall clock that jumps: a Python that has this folder on PYTHONPATH adds the seconds in the file of FAULT_CLOCK.

A stand-in for somebody who sets the machine's clock. Monotonic clocks are left alone, as the kernel leaves them.
"""

import os
import time

_real = time.time
_file = os.environ.get("FAULT_CLOCK", "")


def _jumped() -> float:
    try:
        with open(_file) as f:
            return _real() + float(f.read())
    except (OSError, ValueError):
        return _real()


if _file:
    time.time = _jumped
