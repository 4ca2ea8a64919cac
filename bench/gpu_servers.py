"""Two servers of one shape for a benchmark: a plain one, and one that ``hsx_host serve extraction`` brought up.

Shapes are a ``config.json`` with dummy weights; ``tiny`` is a random checkpoint for a CPU, on which every line of the
benchmarks can be tried before a GPU is there.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import threading
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import requests
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "include"), str(ROOT / "tests" / "system")]

from hsx_host import contract as c  # noqa: E402
from hsx_host import state  # noqa: E402

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
    "tiny": {},
}  # fmt: skip
# What a server needs on a GPU where flashinfer is not installed. The all-reduce that is off is for small messages,
# takes no part in prefill, and wants peer access between the GPUs.
WITHOUT_FLASHINFER = [
    "--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
    "--disable-flashinfer-autotune", "--disable-custom-all-reduce",
]  # fmt: skip
GPU_FLAGS = [*WITHOUT_FLASHINFER, "--skip-tokenizer-init", "--disable-cuda-graph"]
_DUMMY_FLAGS = [
    *GPU_FLAGS, "--load-format", "dummy", "--dtype", "bfloat16", "--mem-fraction-static", "0.85",
    "--max-total-tokens", "262144", "--random-seed", "0",
]  # fmt: skip
# What a server started by the host program gets of this environment (it inherits none by itself).
INHERITED = ("SGLANG_", "TVM_", "HF_", "PYTHON", "NCCL_", "CUDA_", "TORCH_", "NVSHMEM_", "OMP_", "BENCH_")


def add_arguments(p: ArgumentParser) -> None:
    """What both servers and all samples have in common."""
    p.add_argument("--shape", choices=SHAPES, required=True)
    p.add_argument(
        "--concurrency", type=int, default=64, help="samples in flight, of both clients; the case short has its own"
    )
    p.add_argument("--chunk", type=int, default=8192)
    p.add_argument("--writers", type=int, default=4)
    p.add_argument("--ring-mib", type=int, default=4096)
    p.add_argument("--server-args", default="", help="more flags for both servers, separated by spaces")
    p.add_argument("--port", type=int, default=30000, help="this one and the two after it")
    p.add_argument("--output", type=Path, required=True, help="where data sets go: memory-backed, or a disk")
    p.add_argument("--work", type=Path, required=True)


@dataclass(frozen=True)
class Load:
    """Samples of one case, their file as the extraction reads it, and how many are in flight, of both clients."""

    ids: list[list[int]]
    path: Path
    in_flight: int

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


class Servers:
    """Both servers. ``start`` returns when both serve, ``close`` leaves nothing behind."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.work: Path = args.work / f"{args.shape}-{args.port}"
        shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir(parents=True)
        self.model = self.work / "model"
        self.config = self._model()
        self.blocks, self.hidden = int(self.config["num_hidden_layers"]), int(self.config["hidden_size"])
        self.layers = [2, self.blocks // 2, self.blocks - 3]
        self.row_bytes = 2 * self.hidden * (len(self.layers) + 1)
        self.vocab = int(self.config["vocab_size"])
        self.loads: dict[str, Load] = {}
        self.plain: subprocess.Popen[bytes] | None = None

    def load(
        self, name: str, count: int, shortest: int = 99, longest: int = 8000, in_flight: int | None = None
    ) -> Load:
        """Samples of a case: lengths lognormal(7.2, 0.6) within the bounds, evenly where they lie below its middle."""
        if self.args.shape == "tiny":
            longest = min(longest, 900)
        rng = random.Random(0)
        narrow = longest < 1000
        lengths = [
            rng.randint(shortest, longest) if narrow else min(longest, max(shortest, int(rng.lognormvariate(7.2, 0.6))))
            for _ in range(count)
        ]
        ids = [[rng.randrange(100, self.vocab - 100) for _ in range(n)] for n in lengths]
        path = self.work / f"{name}.jsonl"
        with path.open("w") as f:
            for one in ids:
                f.write(json.dumps({"input_ids": one, "loss_mask": [1] * len(one)}) + "\n")
        self.loads[name] = Load(ids, path, in_flight or self.args.concurrency)
        return self.loads[name]

    def start(self) -> None:
        """Both at once, on the same devices."""
        with (self.work / "plain.log").open("wb") as log:
            self.plain = subprocess.Popen(
                [sys.executable, "-m", "sglang.launch_server", *self._flags(self.args.port)],
                stdout=log, stderr=log, start_new_session=True, env=os.environ | self._env(),
            )  # fmt: skip
        self.verb("acquire", self._any_spec())
        self.verb("serve", self._any_spec(), "extraction")
        _wait_healthy(self.url(), self.plain)

    def close(self) -> None:
        """End both servers and remove what was written."""
        spec = self._any_spec()
        if self.plain is not None:
            self.plain.terminate()
        self.verb("serve", spec, "stopped", check=False)
        self.verb("release", spec, "--abandon", check=False)
        if self.plain is not None:
            self.plain.wait(60)
        shutil.rmtree(self.args.output / self._data, ignore_errors=True)

    def url(self, extraction: bool = False) -> str:
        return f"http://127.0.0.1:{self.args.port + extraction}"

    def memory_mib(self) -> dict[str, float]:
        """Resident host memory of each server with all its processes, MiB."""
        server = state.read_server(self._any_spec())
        assert server is not None
        assert self.plain is not None
        return {"plain": _resident(self.plain.pid), "extraction": _resident(server.pid)}

    def extract(self, load: Load, name: str, output: Path | None = None) -> tuple[c.ShardSummary, float, float]:
        """The real verb on a data set of its own: its summary, wall seconds with its start, peak MiB of the client."""
        spec = self.spec(load, name, output)
        self.verb("plan", spec)
        began = time.monotonic()
        text, peak = self._measured("extract", spec, "--shard", "0")
        wall = time.monotonic() - began
        done = c.decode(c.ShardSummary, text)
        if done.published != len(load.ids) or done.failed:
            raise SystemExit(f"{done.published} of {len(load.ids)} published: {done.failures}")
        shutil.rmtree(Path(spec.host.output_root))
        return done, wall, peak

    def spec(self, load: Load, name: str, output: Path | None = None) -> c.RunSpec:
        """The frozen run of one round: each has a data set of its own."""

        def server(port: int) -> c.ServerSettings:
            return c.ServerSettings(
                self._flags(port), self._env(), "127.0.0.1", port, start_timeout_s=400, soak_requests=8
            )

        args = self.args
        return c.RunSpec(
            run_id="bench", profile=f"bench-{args.shape}", manager="process",
            host=c.HostSettings(sys.executable, str(self.work / "home"), str((output or args.output) / self._data)),
            production=server(args.port + 2), extraction=server(args.port + 1),
            model=c.ModelSettings(str(self.model), "dummy"),
            capture=c.CaptureSettings(
                self.layers, ["speculators_v1"], writers=args.writers, ring_bytes=args.ring_mib << 20
            ),
            data=c.DataSettings(
                str(load.path), name, shard_size=len(load.ids), concurrency=load.in_flight, proof_samples=0
            ),
            benchmark=c.BenchmarkSettings(False, {}), cleanup=c.CleanupSettings("never", 0), lease_ttl_s=3600,
        )  # fmt: skip

    def _any_spec(self) -> c.RunSpec:
        """For verbs to which the data set is nothing."""
        return self.spec(next(iter(self.loads.values())), "start")

    def verb(self, verb: str, spec: c.RunSpec, *args: str, check: bool = True) -> str:
        """One verb of the host program to its end; its document."""
        return self._measured(verb, spec, *args, check=check)[0]

    @property
    def _data(self) -> str:
        return f"data-{self.args.port}"

    def _model(self) -> dict[str, Any]:
        if self.args.shape == "tiny":
            import models

            models.build("llama", self.model)
            return dict(json.loads((self.model / "config.json").read_text()))
        self.model.mkdir()
        (self.model / "config.json").write_text(json.dumps(SHAPES[self.args.shape]))
        save_file({"dummy": np.zeros(1, np.float32)}, self.model / "model.safetensors")  # plan wants weights to name
        return SHAPES[self.args.shape]

    def _flags(self, port: int) -> list[str]:
        """The flags of both servers; only the port differs."""
        import sglang_server

        chunk = str(self.args.chunk)
        return [
            "--model-path", str(self.model), "--host", "127.0.0.1", "--port", str(port), "--disable-radix-cache",
            "--chunked-prefill-size", chunk, "--max-prefill-tokens", chunk,
            *(sglang_server.FLAGS if self.args.shape == "tiny" else _DUMMY_FLAGS), *self.args.server_args.split(),
        ]  # fmt: skip

    def _env(self) -> dict[str, str]:
        import sglang_server

        found = {k: v for k, v in os.environ.items() if k.startswith(INHERITED)}
        if self.args.shape == "tiny":
            found["PYTHONPATH"] = os.pathsep.join(p for p in (str(sglang_server.CPU), found.get("PYTHONPATH", "")) if p)
            found |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            found |= sglang_server.ranks(self.args.server_args.split())
        return found

    def _measured(self, verb: str, spec: c.RunSpec, *args: str, check: bool = True) -> tuple[str, float]:
        path = self.work / f"spec-{spec.data.name}.json"
        path.write_text(c.encode(spec))
        env = os.environ | {"PYTHONPATH": f"{ROOT / 'include'}:{os.environ.get('PYTHONPATH', '')}"}
        out = self.work / f"{verb}.out"
        with (self.work / "verbs.log").open("ab") as log, out.open("wb") as answer:
            process = subprocess.Popen(
                [sys.executable, "-m", "hsx_host", verb, *args, "--spec", str(path)],
                stdout=answer, stderr=log, env=env,
            )  # fmt: skip
            peak = 0.0
            while process.poll() is None:
                peak = max(peak, _peak_mib(process.pid))
                time.sleep(0.02)
        if check and process.returncode:
            tail = (self.work / "verbs.log").read_text(errors="replace")[-3000:]
            raise SystemExit(f"{verb} {args} ended with {process.returncode}: {out.read_text()}\n{tail}")
        return out.read_text(), peak


def drive(url: str, load: Load, **more: Any) -> float:
    """Seconds in which a plain client prefills all prompts, longest first, as the extraction does."""
    todo = sorted(load.ids, key=len)
    lock, failures = threading.Lock(), []

    def work() -> None:
        session = requests.Session()
        session.trust_env = False
        while True:
            with lock:
                if not todo:
                    return
                ids = todo.pop()
            body = {
                "input_ids": ids, "stream": False,
                "sampling_params": {"max_new_tokens": 1, "temperature": 0, "ignore_eos": True}, **more,
            }  # fmt: skip
            answer = session.post(f"{url}/generate", json=body, timeout=600)
            if answer.status_code != 200:
                failures.append(answer.text[:200])
            else:
                answer.json()

    began = time.monotonic()
    threads = [threading.Thread(target=work) for _ in range(load.in_flight)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    if failures:
        raise SystemExit(f"{len(failures)} plain requests failed: {failures[0]}")
    return time.monotonic() - began


def _resident(pid: int) -> float:
    tree = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    return round(sum(p.memory_info().rss for p in tree) / (1 << 20), 1)


def _peak_mib(pid: int) -> float:
    """The most that a running process has had in memory (rusage would count what its parent had when it forked)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmHWM")), 0.0)


def _wait_healthy(url: str, server: subprocess.Popen[bytes]) -> None:
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
