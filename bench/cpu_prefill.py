"""Extraction against plain prefill of the very same server, on a CPU with the demo's model: a line a round and a table.

The extraction server is brought up by ``hsx_host serve extraction``. Plain rounds post the same samples with the same
concurrency under rids that the capture plugin ignores; extraction rounds are the real verb, with final files, manifest
and proof. Rounds take turns. Usage: ``make bench``; ``HSX_HOST_PYTHON`` names the Python that has SGLang.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import requests

from hsx_demo.components import REPO
from hsx_demo.demo import Stopwatch, the_model
from hsx_demo.stack import TOKEN, Stack, end_marked
from hsx_host.contract import RunSpec, ShardSummary, decode, encode

ROUNDS, SAMPLES, SHORTEST, LONGEST = 3, 24, 16, 700


def main() -> int:
    """Run the rounds and print; the server is stopped at the end."""
    python = os.environ["HSX_HOST_PYTHON"]
    with tempfile.TemporaryDirectory(prefix="hsx-bench-") as folder:
        work = Path(folder)
        ids = samples()
        data = work / "bench.jsonl"
        data.write_text("".join(json.dumps({"input_ids": i, "loss_mask": [1] * len(i)}) + "\n" for i in ids))
        stack = Stack(work, python_host=python, model=the_model(python, Stopwatch()), dataset=data)
        spec = stack.spec("bench")
        spec = replace(spec, data=replace(spec.data, shard_size=SAMPLES))
        run_verb(stack, spec, "acquire")
        try:
            run_verb(stack, spec, "serve", "extraction")
            rates: dict[str, list[float]] = {"plain": [], "extraction": []}
            plain_round(spec, ids)  # warm
            for n in range(ROUNDS):
                for kind in ("plain", "extraction") if n % 2 == 0 else ("extraction", "plain"):
                    rate = plain_round(spec, ids) if kind == "plain" else extraction_round(stack, spec, n)
                    rates[kind].append(rate)
                    print(json.dumps({"round": n, "kind": kind, "tok_s": round(rate, 1)}), flush=True)
        finally:
            run_verb(stack, spec, "serve", "stopped")
            run_verb(stack, spec, "release", "--abandon")
            end_marked(TOKEN, stack.token)
    plain, ours = (statistics.median(rates[k]) for k in ("plain", "extraction"))
    print("| samples | tokens | plain tok/s | extraction tok/s | ratio |\n|---|---|---|---|---|")
    print(f"| {len(ids)} | {sum(map(len, ids))} | {plain:.0f} | {ours:.0f} | {ours / plain:.3f} |")
    return 0


def samples() -> list[list[int]]:
    """Random ids, lengths spread evenly, the same at each call."""
    rng = random.Random(0)
    return [[rng.randrange(100, 49000) for _ in range(rng.randint(SHORTEST, LONGEST))] for _ in range(SAMPLES)]


def plain_round(spec: RunSpec, ids: list[list[int]]) -> float:
    """Tokens a second of the server without capture, longest first as the extraction does it."""

    def post(prompt: list[int]) -> None:
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}}
        answer = requests.post(f"http://127.0.0.1:{spec.extraction.port}/generate", json=body, timeout=600)
        answer.raise_for_status()

    began = time.monotonic()
    with ThreadPoolExecutor(spec.data.concurrency) as pool:
        list(pool.map(post, sorted(ids, key=len, reverse=True)))
    return sum(map(len, ids)) / (time.monotonic() - began)


def extraction_round(stack: Stack, spec: RunSpec, n: int) -> float:
    """Tokens a second of the verb, into a data set of this round's own."""
    spec = replace(spec, data=replace(spec.data, name=f"round{n}"))
    run_verb(stack, spec, "plan")
    done = decode(ShardSummary, run_verb(stack, spec, "extract", "--shard", "0"))
    if done.published != SAMPLES or done.failed:
        raise SystemExit(f"{done.published} of {SAMPLES} samples published: {done.failures}")
    return done.tok_s


def run_verb(stack: Stack, spec: RunSpec, verb: str, *arguments: str) -> str:
    """One verb of the host program to its end; its document."""
    file = stack.work / f"spec-{spec.data.name}.json"
    file.write_text(encode(spec))
    env = {**os.environ, "PYTHONPATH": str(REPO / "include"), TOKEN: stack.token}
    command = [stack.python_host, "-m", "hsx_host", verb, *arguments, "--spec", str(file)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(
            f"{verb} {' '.join(arguments)} ended with {done.returncode}: {done.stdout}\n{done.stderr[-3000:]}"
        )
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
