"""Extraction against the same server's plain prefill, on a GPU: one JSON line a round and a table.

Two servers of one shape (dummy weights) share the GPU: one plain, one brought up by ``hsx_host serve extraction``. Both
are fed the same samples, in turns, the order swapped every round. The plain client posts the same requests with the
same number of threads and keeps nothing; the extraction is the real verb with everything in: final files, fsync,
manifest, per-sample checks. Printed: tokens a second of each round, the ratio of the medians, bytes a second.

Usage: python bench/gpu_prefill.py --shape 8b --samples 400 --rounds 3 --output /dev/shm/hsx --work /tmp/hsx
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import requests
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "include"))

from hsx_host import contract as c  # noqa: E402

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936, "head_dim": 128,
    "num_key_value_heads": 8, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "rope_theta": 1000000,
    "hidden_act": "silu", "attention_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "8b": QWEN3
    | {"hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 12288},
    "1.7b": QWEN3
    | {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "kimi": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", "vocab_size": 129280,
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 64, "num_key_value_heads": 64, "n_shared_experts": 1, "n_routed_experts": 32,
        "routed_scaling_factor": 2.5, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
        "v_head_dim": 128, "qk_nope_head_dim": 128, "topk_method": "noaux_tc", "n_group": 1, "topk_group": 1,
        "num_experts_per_tok": 8, "moe_layer_freq": 1, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "scoring_func": "sigmoid", "hidden_act": "silu", "max_position_embeddings": 40960, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "attention_bias": False, "torch_dtype": "bfloat16", "rope_theta": 10000,
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
        "bos_token_id": 0, "eos_token_id": 1,
    },
}  # fmt: skip


def main() -> int:
    """Run one shape; exit 1 where a round failed."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--shape", choices=SHAPES, required=True)
    p.add_argument("--samples", type=int, default=400)
    p.add_argument("--shortest", type=int, default=99)
    p.add_argument("--longest", type=int, default=8000)
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--concurrency", type=int, default=64)
    p.add_argument("--chunk", type=int, default=16384)
    p.add_argument("--writers", type=int, default=4)
    p.add_argument("--ring-mib", type=int, default=2048)
    p.add_argument("--output", type=Path, required=True, help="where data sets go: memory-backed, or a disk")
    p.add_argument("--work", type=Path, required=True)
    args = p.parse_args()
    bench = Bench(args)
    try:
        return bench.run()
    finally:
        bench.close()


class Bench:
    """Two servers, one data set, rounds in turns."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.work: Path = args.work / args.shape
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.model = self.work / "model"
        self.model.mkdir()
        config = SHAPES[args.shape]
        (self.model / "config.json").write_text(json.dumps(config))
        save_file({"dummy": np.zeros(1, np.float32)}, self.model / "model.safetensors")  # plan wants weights to name
        blocks = int(config["num_hidden_layers"])
        self.layers = [2, blocks // 2, blocks - 3]
        self.ids = samples(args.samples, args.shortest, args.longest, int(config["vocab_size"]))
        self.tokens = sum(map(len, self.ids))
        self.data = self.work / "data.jsonl"
        with self.data.open("w") as f:
            for ids in self.ids:
                f.write(json.dumps({"input_ids": ids, "loss_mask": [1] * len(ids)}) + "\n")
        self.plain: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Start both servers, run the rounds, print."""
        self.plain = self._start_plain()
        self._verb("acquire", self.spec("start"))
        self._verb("serve", self.spec("start"), "extraction")
        wait_healthy(self.url(30000), self.plain)
        for url in (self.url(30000), self.url(30001)):
            drive(url, self.ids[: max(8, len(self.ids) // 8)], self.args.concurrency)
        rates: dict[str, list[float]] = {"plain": [], "extraction": []}
        for n in range(self.args.rounds):
            for kind in ("plain", "extraction") if n % 2 == 0 else ("extraction", "plain"):
                line = self._plain_round() if kind == "plain" else self._extraction_round(n)
                rates[kind].append(line["tok_s"])
                print(json.dumps({"shape": self.args.shape, "round": n, "kind": kind, **line}), flush=True)
        plain, ours = (statistics.median(rates[k]) for k in ("plain", "extraction"))
        row_bytes = 2 * int(SHAPES[self.args.shape]["hidden_size"]) * (len(self.layers) + 1)
        print("| shape | samples | tokens | plain tok/s | extraction tok/s | ratio | GB/s | output |")
        print("|---|---|---|---|---|---|---|---|")
        print(
            f"| {self.args.shape} | {len(self.ids)} | {self.tokens} | {plain:,.0f} | {ours:,.0f} | {ours / plain:.3f} "
            f"| {ours * row_bytes / 1e9:.2f} | {self.args.output} |",
            flush=True,
        )
        return 0

    def close(self) -> None:
        """End both servers and remove what was written."""
        if self.plain is not None:
            self.plain.terminate()
        self._verb("serve", self.spec("start"), "stopped", check=False)
        self._verb("release", self.spec("start"), "--abandon", check=False)
        if self.plain is not None:
            self.plain.wait(60)
        shutil.rmtree(self.args.output / "data", ignore_errors=True)

    def url(self, port: int) -> str:
        return f"http://127.0.0.1:{port}"

    def server_args(self, port: int) -> list[str]:
        """The flags of both servers; only the port differs."""
        return [
            "--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port), "--load-format", "dummy",
            "--dtype", "bfloat16", "--skip-tokenizer-init", "--attention-backend", "triton", "--sampling-backend",
            "pytorch", "--grammar-backend", "none", "--disable-flashinfer-autotune", "--disable-radix-cache",
            "--disable-cuda-graph", "--chunked-prefill-size", str(self.args.chunk), "--max-prefill-tokens",
            str(self.args.chunk), "--mem-fraction-static", "0.85", "--max-total-tokens", "262144", "--random-seed", "0",
        ]  # fmt: skip

    def spec(self, name: str) -> c.RunSpec:
        """The frozen run of one round: each has a data set of its own."""
        env = {k: v for k, v in os.environ.items() if k.startswith(("SGLANG_", "TVM_", "HF_", "PYTHON", "NCCL_"))}

        def server(port: int) -> c.ServerSettings:
            return c.ServerSettings(
                self.server_args(port), env, "127.0.0.1", port, start_timeout_s=400, soak_requests=8
            )

        return c.RunSpec(
            run_id="bench", profile=f"bench-{self.args.shape}", manager="process",
            host=c.HostSettings(sys.executable, str(self.work / "home"), str(self.args.output / "data")),
            production=server(30002), extraction=server(30001), model=c.ModelSettings(str(self.model), "dummy"),
            capture=c.CaptureSettings(
                self.layers, ["speculators_v1"], writers=self.args.writers, ring_bytes=self.args.ring_mib << 20
            ),
            data=c.DataSettings(
                str(self.data), name, shard_size=len(self.ids), concurrency=self.args.concurrency, proof_samples=0
            ),
            benchmark=c.BenchmarkSettings(False, {}), cleanup=c.CleanupSettings("never", 0), lease_ttl_s=3600,
        )  # fmt: skip

    def _verb(self, verb: str, spec: c.RunSpec, *args: str, check: bool = True) -> str:
        path = self.work / f"spec-{spec.data.name}.json"
        path.write_text(c.encode(spec))
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'include'}:{os.environ.get('PYTHONPATH', '')}"}
        with (self.work / "verbs.log").open("ab") as log:
            done = subprocess.run(
                [sys.executable, "-m", "hsx_host", verb, *args, "--spec", str(path)],
                stdout=subprocess.PIPE, stderr=log, env=env, check=False,
            )  # fmt: skip
        if check and done.returncode:
            tail = (self.work / "verbs.log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"{verb} {args} ended with {done.returncode}: {done.stdout.decode()}\n{tail}")
        return done.stdout.decode()

    def _start_plain(self) -> subprocess.Popen[bytes]:
        with (self.work / "plain.log").open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *self.server_args(30000)],
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip

    def _plain_round(self) -> dict[str, float]:
        seconds = drive(self.url(30000), self.ids, self.args.concurrency)
        return {"seconds": round(seconds, 3), "tok_s": round(self.tokens / seconds, 1)}

    def _extraction_round(self, n: int) -> dict[str, float]:
        spec = self.spec(f"round{n}")
        self._verb("plan", spec)
        done = c.decode(c.ShardSummary, self._verb("extract", spec, "--shard", "0"))
        if done.published != len(self.ids) or done.failed:
            raise SystemExit(f"{done.published} of {len(self.ids)} published: {done.failures}")
        shutil.rmtree(self.args.output / "data")
        return {"seconds": done.seconds, "tok_s": done.tok_s, "gb_s": round(done.bytes / done.seconds / 1e9, 3)}


def samples(count: int, shortest: int, longest: int, vocab: int) -> list[list[int]]:
    """Random ids, lengths lognormal(7.2, 0.6) within the bounds."""
    rng = random.Random(0)
    lengths = [min(longest, max(shortest, int(rng.lognormvariate(7.2, 0.6)))) for _ in range(count)]
    return [[rng.randrange(100, vocab - 100) for _ in range(n)] for n in lengths]


def drive(url: str, prompts: list[list[int]], concurrency: int) -> float:
    """Seconds in which a plain client prefills all prompts, longest first, as the extraction does."""
    todo = sorted(prompts, key=len)
    lock, failures = threading.Lock(), []

    def work() -> None:
        session = requests.Session()
        while True:
            with lock:
                if not todo:
                    return
                ids = todo.pop()
            body = {
                "input_ids": ids, "stream": False,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True},
            }  # fmt: skip
            answer = session.post(f"{url}/generate", json=body, timeout=600)
            if answer.status_code != 200:
                failures.append(answer.text[:200])

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(concurrency)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise SystemExit(f"{len(failures)} plain requests failed: {failures[0]}")
    return time.monotonic() - began


def wait_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
    """Wait until the plain server generates."""
    for _ in range(400):
        try:
            if requests.get(f"{url}/health_generate", timeout=30).status_code == 200:
                return
        except requests.RequestException:
            pass
        if server.poll() is not None:
            raise SystemExit("the plain server ended; see plain.log")
        time.sleep(1)
    raise SystemExit("the plain server does not answer; see plain.log")


if __name__ == "__main__":
    raise SystemExit(main())
