"""Extraction against the same server's plain prefill, on a GPU: one JSON line a round, and a table with a line a case.

Two servers of one shape (dummy weights) share the GPU: one plain, one brought up by ``hsx_host serve extraction``. Both
are fed the same samples, in turns, the order swapped every round. The plain client posts the same requests with the
same number of threads and keeps nothing; the extraction is the real verb with everything in: final files, fsync,
manifest, checksums, per-sample checks. Ratios are those of the medians. Cases:

  long      --samples of 99 to 8,000 tokens, lognormal(7.2, 0.6)
  quarter   the same with a quarter of the samples: how time and memory grow
  unseen    as long; beside it the same requests to the extraction server under ids that the capture ignores
  short     2,000 samples of 99 to 200 tokens, 256 in flight
  disk      --disk-samples into --disk; beside it one sequential write of the same bytes with fsync
  json      the extraction of ``long`` beside stock ``return_hidden_states`` over JSON of its first --json-samples
            (with --server-args=--enable-return-hidden-states)

Usage: python bench/gpu_prefill.py --shape 8b --cases long quarter short --output /dev/shm/hsx --work /tmp/hsx
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu_servers import Load, Servers, add_arguments, drive

SHORT_IN_FLIGHT = 256
_BLOCK = 16 << 20


def main() -> int:
    """Run the cases of one shape; exit 1 where a round failed."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(p)
    p.add_argument("--cases", nargs="+", default=["long"], choices=CASES)
    p.add_argument("--samples", type=int, default=400)
    p.add_argument("--short-samples", type=int, default=2000)
    p.add_argument("--disk-samples", type=int, default=400)
    p.add_argument("--json-samples", type=int, default=6)
    p.add_argument("--disk", type=Path, default=Path("/tmp/hsx-bench-disk"))
    p.add_argument("--rounds", type=int, default=3)
    args = p.parse_args()
    if "json" in args.cases and "long" not in args.cases[: args.cases.index("json")]:
        p.error("--cases: json is compared with long, which comes before it")
    servers = Servers(args)
    loads = {case: CASES[case](servers) for case in args.cases}
    try:
        began = time.monotonic()
        servers.start()
        first = loads[args.cases[0]]
        warm = replace(first, ids=first.ids[: max(8, len(first.ids) // 8)], in_flight=args.concurrency)
        for extraction in (False, True):
            drive(servers.url(extraction), warm)
        _tell(args.shape, "start", seconds=round(time.monotonic() - began, 1), server_mib=servers.memory_mib())
        measured: dict[str, list[float]] = {}
        rows = [_case(servers, case, load, measured) for case, load in loads.items()]
    finally:
        servers.close()
    print("| shape | case | samples | tokens | baseline | its tok/s | extraction tok/s | ratio | spread | GB/s |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    print("\n".join(rows), flush=True)
    return 0


CASES: dict[str, Callable[[Servers], Load]] = {
    "long": lambda s: s.load("long", s.args.samples),
    "quarter": lambda s: s.load("quarter", s.args.samples // 4),
    "short": lambda s: s.load("short", s.args.short_samples, 99, 200, SHORT_IN_FLIGHT),
    "disk": lambda s: s.load("disk", s.args.disk_samples),
    "json": lambda s: s.load("json", s.args.json_samples),  # as long as the first of them
    "unseen": lambda s: s.load("unseen", s.args.samples),
}


def _case(servers: Servers, case: str, load: Load, measured: dict[str, list[float]]) -> str:
    """All rounds of a case, and its row of the table; ``measured`` gets the extraction's rates."""
    args = servers.args
    baselines: dict[str, Callable[[], float]] = {"plain prefill": lambda: drive(servers.url(), load)}
    if case == "unseen":
        baselines["unseen"] = lambda: drive(servers.url(True), load)
    if case == "disk":
        baselines["sequential write"] = lambda: _write(args.disk, load.tokens * servers.row_bytes)
    if case == "json":
        baselines = {"JSON": lambda: drive(servers.url(), load, return_hidden_states=True)}
    rates: dict[str, list[float]] = {name: [] for name in baselines}
    rates |= {} if case == "json" else {"extraction": []}
    for n in range(args.rounds):
        for kind in rates if n % 2 == 0 else reversed(rates):
            facts: dict[str, Any]
            if kind == "extraction":
                done, wall, peak = servers.extract(load, f"{case}{n}", args.disk if case == "disk" else None)
                seconds = done.seconds
                facts = {"wall_s": round(wall, 2), "client_mib": round(peak, 1), "server_mib": servers.memory_mib()}
            else:
                seconds, facts = baselines[kind](), {}
            rates[kind].append(load.tokens / seconds)
            _tell(
                args.shape,
                case,
                round=n,
                kind=kind,
                seconds=round(seconds, 3),
                tok_s=round(rates[kind][-1], 1),
                **facts,
            )
    rows = []
    measured[case] = rates.setdefault("extraction", measured.get("long", []))
    ours = statistics.median(measured[case])
    for name in baselines:
        base = statistics.median(rates[name])
        each = [a / b for a, b in zip(rates["extraction"], rates[name], strict=True)]
        rows.append(
            f"| {args.shape} | {case} | {len(load.ids)} | {load.tokens:,} | {name} | {base:,.0f} | {ours:,.0f} "
            f"| {ours / base:.3f} | {min(each):.3f} to {max(each):.3f} | {ours * servers.row_bytes / 1e9:.2f} |"
        )
    return "\n".join(rows)


def _write(folder: Path, size: int) -> float:
    """Seconds of one sequential write of ``size`` bytes with fsync, the file's creation included."""
    folder.mkdir(parents=True, exist_ok=True)
    path, block = folder / "sequential", memoryview(os.urandom(_BLOCK))
    began = time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        while size > 0:
            size -= os.write(fd, block[: min(size, _BLOCK)])
        os.fsync(fd)
        return time.monotonic() - began
    finally:
        os.close(fd)
        path.unlink()


def _tell(shape: str, case: str, **facts: Any) -> None:
    print(json.dumps({"shape": shape, "case": case, **facts}), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
