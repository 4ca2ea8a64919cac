"""Captured rows of two ranks against one rank's, on the same random weights: one JSON line a server and case.

For each model (the 8B shape and the Kimi-like one, with fewer blocks and experts): a server on one device, one of two
tensor-parallel ranks, one of two data-parallel ranks, and one with attention data parallelism, all at once. Each gets
the same prompts, alone and 16 at once. Every sample must be whole and written once; every plane must be nearest to the
same plane of the first server and within bf16 error of it (median row: noise sends some tokens of a mixture to another
expert); the scheduler that writes holds the ring, another rank of its group holds none; with data parallelism both
schedulers prefill. ``--cpu`` runs the same lines with tiny models on two CPU ranks.

Usage: python bench/gpu_ranks.py --work /tmp/hsx-ranks
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gpu_exact
import models
import psutil
import sglang_server
import torch
from capture_client import Client
from gpu_exact import ALLOWED, CHUNK, LAYERS, VOCAB, error, prompt

RING = 1 << 30
SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "8b": ("qwen3", {"hidden_size": 4096, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 12288}),
    "kimi": (
        "deepseek_v3",
        {"hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "intermediate_size": 18432,
         "moe_intermediate_size": 2048, "q_lora_rank": 1536},
    ),
}  # fmt: skip
SERVERS = {
    "one": "",
    "tensor parallel 2": "--tp-size 2",
    "data parallel 2": "--dp-size 2",
    "attention data parallel 2": "--tp-size 2 --dp-size 2 --enable-dp-attention",
}
ONE = "one"


@dataclass
class Served:
    """One server, and what was captured by it: planes [planes, tokens, hidden] by case and prompt."""

    client: Client
    planes: dict[str, list[torch.Tensor]]
    tokens: dict[str, list[int]]


def main() -> int:
    """Run all models; exit 1 where something is off."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--models", nargs="+", default=list(SIZES), choices=SIZES)
    p.add_argument("--servers", nargs="+", default=list(SERVERS), choices=SERVERS)
    p.add_argument("--cpu", action="store_true")
    args = p.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    return 1 if sum(_model(name, args) for name in args.models) else 0


def _model(name: str, args: argparse.Namespace) -> int:
    """All servers of one model; how many are off."""
    folder = args.work / name
    folder.mkdir(parents=True)
    kind, sizes = SIZES[name]
    if args.cpu:
        model, hidden, blocks, vocab = models.build("llama", folder / "model"), models.HIDDEN["llama"], 8, models.VOCAB
    else:
        model = gpu_exact.build(kind, folder / "model", "cuda", **sizes)
        torch.cuda.empty_cache()
        hidden, blocks, vocab = sizes["hidden_size"], int(gpu_exact.COMMON["num_hidden_layers"]), VOCAB
    serve = _serve_on_cpu if args.cpu else gpu_exact.serve
    names = [s for s in SERVERS if s in args.servers]
    with ThreadPoolExecutor(1 if args.cpu else len(names)) as pool:
        started = list(pool.map(lambda s: _start(s, model, folder, hidden, blocks, serve), names))
    served = {s: one for s, one in zip(names, started, strict=True) if one is not None}
    bad = len(names) - len(served)
    try:
        for s, one in served.items():
            _capture_all(one, vocab, sglang_server.CHUNK if args.cpu else CHUNK)
            bad += _say(name, s, _problems(s, one, served[ONE], args.cpu))
    finally:
        for one in served.values():
            assert one.client.server is not None
            one.client.server.stop()
    shutil.rmtree(folder)
    return bad


def _start(name: str, model: Path, folder: Path, hidden: int, blocks: int, serve: Any) -> Served | None:
    """One server; None, and why, where it does not start."""
    spool = folder / name.replace(" ", "-")
    spool.mkdir()
    client = Client(spool, LAYERS, hidden, blocks)
    client.write_spec(ring_bytes=RING, writers=4)
    try:
        client.server = serve(model, client.spec, folder / f"{spool.name}.log", SERVERS[name].split())
    except RuntimeError as e:
        print(json.dumps({"server": name, "ok": False, "does not start": str(e)[-1500:]}), flush=True)
        return None
    return Served(client, {}, {})


def _capture_all(one: Served, vocab: int, chunk: int) -> None:
    """The same prompts for every server: alone, then 16 at once."""
    lengths = [1, 2, 19, chunk - 1, chunk, chunk + 1, 2 * chunk + 1]
    cases = {f"alone {n}": [prompt(n, n, vocab)] for n in lengths}
    cases["16 at once"] = [prompt(100 + i, 40 + chunk * i // 8, vocab) for i in range(16)]
    for case, prompts in cases.items():
        with ThreadPoolExecutor(len(prompts)) as pool:
            got = list(pool.map(one.client.capture, prompts))
        for (planes, record, _), ids in zip(got, prompts, strict=True):
            wanted = planes.numel() * 2
            if record["rows"] != len(ids) or record["bytes"] != wanted:
                raise SystemExit(
                    f"{case}: {record['rows']} rows, {record['bytes']} bytes; {len(ids)} and {wanted} wanted"
                )
        one.planes[case] = [planes for planes, _, _ in got]
        one.tokens[case] = [token for _, _, token in got]


def _problems(name: str, one: Served, reference: Served, cpu: bool) -> tuple[dict[str, Any], list[str]]:
    """Facts of one server beside the first one's rows, and what is wrong with it."""
    problems: list[str] = []
    ready = one.client.ready()
    writing = [r for r in ready if "this rank" in r["seams"].get("writer", "")]
    expected = 2 if "data" in name else 1
    if len(writing) != expected or any(r["error"] for r in ready):
        problems.append(f"{len(writing)} schedulers write, expected {expected}: {[r['error'] for r in ready]}")
    memory = {r["pid"]: round(psutil.Process(r["pid"]).memory_info().rss / (1 << 20)) for r in ready}
    if name == "tensor parallel 2":
        first, second = (memory[r["pid"]] for r in sorted(ready, key=lambda r: r["tp_rank"]))
        if not cpu and first - second < 0.8 * RING / (1 << 20):  # a CPU's ring is not touched before it is used
            problems.append(f"host memory of the ranks is {first} and {second} MiB, the ring has {RING >> 20}")
    same = total = 0
    worst = 0.0
    for case, wanted in reference.planes.items():
        for planes, others in zip(one.planes[case], wanted, strict=True):
            errors = [[error(plane, other) for other in others] for plane in planes]
            worst = max([worst, *(row[k] for k, row in enumerate(errors))])
            if any(row.index(min(row)) != k or row[k] > ALLOWED for k, row in enumerate(errors)):
                problems.append(f"{case}, {planes.shape[1]} tokens: {errors}")
        same += sum(a == b for a, b in zip(one.tokens[case], reference.tokens[case], strict=True))
        total += len(wanted)
    assert one.client.server is not None
    prefills = Counter(re.findall(r"(DP\d+)[^\]]*\].*Prefill batch", one.client.server.log.read_text(errors="replace")))
    if expected == 2 and len(prefills) != 2:
        problems.append(f"prefills by data-parallel rank: {dict(prefills)}")
    facts = {
        "schedulers": len(ready), "writing": len(writing), "host_mib": sorted(memory.values(), reverse=True),
        "worst_error": round(worst, 5), "next_tokens_equal": f"{same} of {total}", "prefills": dict(prefills),
    }  # fmt: skip
    return facts, problems


def _say(model: str, server: str, found: tuple[dict[str, Any], list[str]]) -> int:
    facts, problems = found
    line = {"model": model, "server": server, **facts, "ok": not problems}
    print(json.dumps(line | ({"problems": problems[:4]} if problems else {})), flush=True)
    return 1 if problems else 0


def _serve_on_cpu(model: Path, spec: Path, log: Path, more: list[str]) -> Any:
    return sglang_server.start(model, log, spec=spec, args=more)


if __name__ == "__main__":
    raise SystemExit(main())
