"""What the data plane costs without a GPU: writers, checksums, resume, plan, verify, client; a line a case and a table.

Each figure stands beside a baseline of the same run on the same bytes. Ratios and growth are taken from CPU seconds,
since other work on the machine stretches the clock's; throughputs say which of both they are. Writers: the capture
plugin's own, from a slot of the ring into the sample's file, in each layout, against a plain write; beside them the
peers' way (``torch.save`` of sliced copies, and gzip). Resume, plan, verify and client are the verbs' own code on data
sets made here; the engine of the client case is a stand-in that answers at once, so that only the client is measured.

Usage: python bench/host_plane.py [--work DIR] [--only CASE,CASE] [--small]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
for folder in ("include", "include/patches/hsx_capture"):
    sys.path.insert(0, str(ROOT / folder))

import host_plane_data as data  # noqa: E402

from hsx_host import checksum as checksum_of  # noqa: E402

HIDDEN, PLANES, TOKENS = 4096, 4, 1600  # a sample of an 8B model: 52 MB
ROUNDS = 3


def main() -> int:
    """Run the cases; the table comes last."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, default=Path("/dev/shm"), help="memory-backed, or a disk")
    p.add_argument("--only", default=",".join(CASES), metavar="CASE,CASE")
    p.add_argument("--small", action="store_true", help="a tenth of the work, to see that it runs")
    args = p.parse_args()
    if unknown := set(args.only.split(",")) - set(CASES):
        p.error(f"--only {args.only}: no case {', '.join(sorted(unknown))}; there are {', '.join(CASES)}")
    table: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="hsx-bench-", dir=args.work) as work:
        for name in args.only.split(","):
            for line in CASES[name](Path(work), 10 if args.small else 1):
                print(json.dumps({"case": name, **line}), flush=True)
                table.append(line)
    print("| what | measured | baseline of the same run | ratio |\n|---|---|---|---|")
    for line in table:
        print("| " + " | ".join(str(line[k]) for k in ("what", "got", "baseline", "ratio")) + " |")
    return 0


def cost(
    body: Callable[[], object], rounds: int = ROUNDS, before: Callable[[], object] = lambda: None
) -> tuple[float, float]:
    """Median clock seconds and CPU seconds of a few rounds; ``before`` each one, unmeasured."""
    spent = []
    for _ in range(rounds):
        before()
        clock, cpu = time.perf_counter(), time.process_time()
        body()
        spent.append((time.perf_counter() - clock, time.process_time() - cpu))
    return median(spent)


def median(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(r[0] for r in rounds), statistics.median(r[1] for r in rounds)


def rate(size: float, spent: tuple[float, float]) -> str:
    """GB/s by the clock, and for each core that was at work."""
    return f"{size / spent[0] / 1e9:.2f} GB/s, {size / spent[1] / 1e9:.2f} a core"


def row(what: str, got: str, baseline: str = "", ratio: float | None = None) -> dict[str, Any]:
    return {"what": what, "got": got, "baseline": baseline, "ratio": "" if ratio is None else round(ratio, 3)}


def writers(work: Path, less: int) -> list[dict[str, Any]]:
    """The plugin's writer threads in each layout, against a plain write of the same bytes."""
    samples = max(2, 12 // less)
    size = samples * PLANES * TOKENS * HIDDEN * 2
    source = np.random.default_rng(0).integers(0, 256, PLANES * TOKENS * HIDDEN * 2, dtype=np.uint8)
    batch = data.batch(source, PLANES, TOKENS, HIDDEN)

    slot = source[: len(source) * data.CHUNK // TOKENS]

    clear = partial(data.clear, work)

    def plain(threads: int = 1) -> None:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(lambda i: data.write_plain(work / f"plain{i}", slot, TOKENS // data.CHUNK), range(samples)))

    def peer(way: Callable[[tuple[Any, Path]], None], count: int) -> Callable[[], None]:
        def body() -> None:
            for i in range(count):
                way((batch, work / f"peer{i}"))

        return body

    lines = []
    for layout in ("planes", "rows", "mixed"):
        for threads in (1, 2):
            ours, base = [], []
            for _ in range(ROUNDS):  # turn by turn: whatever else the machine does strikes both
                base.append(cost(partial(plain, threads), 1, clear))
                clear()
                ours.append(data.run_writers(work, layout, threads, samples, PLANES, TOKENS, HIDDEN, source))
            got, plainly = median(ours), median(base)
            lines.append(
                row(
                    f"writers, {LAYOUTS[layout]}, {threads} thread{'s' * (threads > 1)}, with checksums",
                    rate(size, got),
                    f"plain write by as many {rate(size, plainly)}",
                    plainly[1] / got[1],
                )
            )
    plainly = cost(plain, before=clear)
    ways = {"torch.save of sliced copies": (data.torch_save, samples), "torch.save and gzip -1": (data.torch_gzip, 1)}
    for name, (way, count) in ways.items():
        got, part = cost(peer(way, count), ROUNDS if count > 1 else 1, clear), count / samples
        base = f"plain write {rate(size, plainly)}"
        lines.append(row(f"peers: {name}", rate(size * part, got), base, plainly[1] * part / got[1]))
    clear()
    return lines


def checksum(work: Path, less: int) -> list[dict[str, Any]]:
    """CRC-32 of bytes in memory, and ``verify --deep`` of files against reading them."""
    block = np.random.default_rng(0).integers(0, 256, (256 // less) << 20, dtype=np.uint8)
    pieces = [block[i : i + (1 << 20)] for i in range(0, len(block), 1 << 20)]
    target = np.empty_like(pieces[0])
    copy, size, lines = cost(lambda: [np.copyto(target, p) for p in pieces]), float(len(block)), []
    for name, crc32 in {"zlib": zlib.crc32, checksum_of.SOURCE: checksum_of.crc32}.items():
        crc = cost(lambda crc32=crc32: [crc32(p) for p in pieces])
        what = f"CRC-32 of {name} in memory, 1 thread"
        lines.append(row(what, rate(size, crc), f"copy {rate(size, copy)}", copy[1] / crc[1]))
    made = data.Published(work, samples=max(4, 40 // less), tokens=TOKENS // 4, hidden=HIDDEN, whole=True)
    files = sorted((made.dataset / "v1").glob("*.pt"))
    size = float(sum(f.stat().st_size for f in files))

    def read() -> None:
        for f in files:
            with f.open("rb") as opened:
                while opened.read(8 << 20):
                    pass

    base, deep, quick = cost(read), cost(lambda: made.verify(deep=True)), cost(lambda: made.verify(deep=False))
    what = f"verify --deep, {len(files)} files of {size / len(files) / 1e6:.0f} MB"
    lines.append(row(what, rate(size, deep), f"read {rate(size, base)}", base[1] / deep[1]))
    made.remove()
    made = data.Published(work, samples=5000 // less, tokens=4, hidden=8, whole=True)
    quick = cost(lambda: made.verify(deep=False))
    lines.append(
        row(f"verify, {5000 // less:,} files by their headers", f"{5000 // less / quick[1]:,.0f} files/s a core")
    )
    made.remove()
    return lines


def in_turns(few: int, many: int, measure: Callable[[int], Any]) -> dict[int, Any]:
    """Of each size the round that took the least CPU: small and large in turns, since a machine's pace changes."""
    rounds = [{n: measure(n) for n in (few, many)} for _ in range(ROUNDS)]
    return {n: min((one[n] for one in rounds), key=lambda measured: measured[1]) for n in (few, many)}


def resume(work: Path, less: int) -> list[dict[str, Any]]:
    """``extract`` of a shard that is done already: N and 4N samples."""
    few, many = 2500 // less, 10_000 // less

    def resumed(n: int) -> tuple[float, float]:
        made = data.Published(work, samples=n, tokens=4, hidden=8, whole=False)
        least = min((cost(made.extract, 1) for _ in range(ROUNDS)), key=lambda spent: spent[1])
        made.remove()
        return least

    spent = in_turns(few, many, resumed)
    grown = spent[many][1] / spent[few][1]
    return [
        row(f"resume of a shard of {many:,} samples", f"{spent[many][0]:.2f} s, {spent[many][1]:.2f} s of CPU"),
        row(f"resume, time({many:,}) / time({few:,})", f"{grown:.2f}", "less than 4.3"),
    ]


def plan(work: Path, less: int) -> list[dict[str, Any]]:
    """``plan`` of N and 4N samples of 2,000 tokens, each in its own process, against ``json.loads`` of its lines."""
    few, many = 2500 // less, 10_000 // less

    def planned(n: int) -> tuple[float, float, int, float]:
        made = data.planned(work, n, 2000, shard_size=500)
        measured, (_, parsed) = data.measured(work, made, "plan"), cost(made.parse, 1)
        made.remove()
        return (*measured, parsed)

    found = in_turns(few, many, planned)
    tokens, (clock, cpu, peak, base) = many * 2000 / 1e6, found[many]
    return [
        row(
            f"plan of {many:,} samples of 2,000 tokens", f"{tokens / clock:.2f} M tokens/s, {tokens / cpu:.2f} a core",
            f"json.loads alone {tokens / base:.2f} a core", base / cpu,
        ),
        row(f"plan, time({many:,}) / time({few:,})", f"{cpu / found[few][1]:.2f}", "less than 4.3"),
        row("plan, peak memory", f"{peak} MB at {many:,}", f"{found[few][2]} MB at {few:,}", peak / found[few][2]),
    ]  # fmt: skip


def client(work: Path, less: int) -> list[dict[str, Any]]:
    """Short samples (99 to 200 tokens) through the whole client, against an engine that answers at once."""
    few, many = 500 // less, 2000 // less

    def extracted(n: int) -> tuple[float, float, int, float]:
        made = data.planned(work, n, 0, shard_size=n)
        measured, bare = data.measured(work, made, "extract"), data.bare_requests(work, made)
        made.remove()
        return (*measured, bare)

    found = in_turns(few, many, extracted)
    clock, cpu, peak, base = found[many]
    return [
        row(
            f"client, {many:,} samples of 99 to 200 tokens", f"{many / clock:,.0f} samples/s, {many / cpu:,.0f} a core",
            f"bare requests from Python {many / base:,.0f} a core", base / cpu,
        ),
        row(f"client, time({many:,}) / time({few:,})", f"{cpu / found[few][1]:.2f}", "less than 4.3"),
        row("client, peak memory", f"{peak} MB at {many:,}", f"{found[few][2]} MB at {few:,}", peak / found[few][2]),
    ]  # fmt: skip


LAYOUTS = {"planes": "speculators v1 (planes apart)", "rows": "[seq, L+1, H]", "mixed": "[seq, 3H] and [seq, H]"}
CASES = {"writers": writers, "checksum": checksum, "resume": resume, "plan": plan, "client": client}

if __name__ == "__main__":
    sys.exit(main())
