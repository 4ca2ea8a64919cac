"""Runs ``sglang.bench_serving`` several times in one process, since its imports take longer than a small load.

A script by itself, run by path in the server's environment: ``python -P bench_loads.py '[["--host", ...], ...]'``.
Each inner list is one command line, run exactly as ``python -m sglang.bench_serving`` would.
"""

from __future__ import annotations

import json
import runpy
import sys

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        sys.argv = ["sglang.bench_serving", *arguments]
        runpy.run_module("sglang.bench_serving", run_name="__main__")
