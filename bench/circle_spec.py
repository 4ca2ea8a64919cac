"""What the circle runs: production, extraction and acceptance of one model, and the training of its drafter."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

from gpu_servers import INHERITED, WITHOUT_FLASHINFER

from hsx_host import contract as c

ROOT = Path(__file__).resolve().parent.parent
CPU_FLAGS = ["--device", "cpu", "--attention-backend", "torch_native", "--sampling-backend", "pytorch",
             "--disable-cuda-graph", "--sleep-on-idle", "--max-total-tokens", "16384"]  # fmt: skip
# A pool that several servers have room for; prefill goes without graphs, since those are compiled first.
GPU_FLAGS = [
    "--mem-fraction-static", "0.8", "--max-total-tokens", "131072", *WITHOUT_FLASHINFER,
    "--cuda-graph-backend-prefill", "disabled", "--cuda-graph-bs",
]  # fmt: skip
GRAPHS_OF_MANY, GRAPHS_OF_FEW = ["1", "8", "32", "64", "128"], ["1", "2"]
CPU_ENV = {"PYTHONPATH": str(ROOT / "include/patches/hsx_cpu"), "TORCHDYNAMO_DISABLE": "1",
           "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"), "OMP_WAIT_POLICY": "PASSIVE"}  # fmt: skip


def make_spec(args: Namespace) -> c.RunSpec:
    """Production, extraction and acceptance are one launch with other flags, as a profile makes them."""
    cpu = args.device == "cpu"
    base = ["--model-path", str(args.model), "--random-seed", "0", "--context-length", "2048"]
    more_flags = args.server_args.split()
    graphs = ([], []) if cpu else (GRAPHS_OF_MANY, GRAPHS_OF_FEW)
    many, few = ([*(CPU_FLAGS if cpu else GPU_FLAGS), *sizes, *more_flags] for sizes in graphs)
    inherited = {k: v for k, v in os.environ.items() if k.startswith(INHERITED)}
    env = {**inherited, "HF_HUB_OFFLINE": "1", **(CPU_ENV if cpu else {})}

    def server(port: int, flags: list[str], *more: str) -> c.ServerSettings:
        address = ["--host", "127.0.0.1", "--port", str(port)]
        own = [f for f in more if f not in flags]
        return c.ServerSettings([*base, *flags, *own, *address], env, "127.0.0.1", port, 900.0, 30.0, 2)

    chunk = ("--chunked-prefill-size", "512")
    return c.RunSpec(
        run_id="circle",
        profile="circle",
        manager="process",
        host=c.HostSettings(sys.executable, str(args.work / "home"), str(args.work / "output")),
        production=server(args.port, many, *chunk),
        extraction=server(args.port, many, *chunk, "--disable-radix-cache", "--disable-cuda-graph"),
        model=c.ModelSettings(str(args.model), ""),
        capture=c.CaptureSettings(list(args.layers), ["speculators_v1"], writers=2, ring_bytes=1 << 26),
        data=c.DataSettings(
            str(args.work / "seed.jsonl"), "circle", 1000, concurrency=args.concurrency, proof_samples=8
        ),
        benchmark=c.BenchmarkSettings(False, {}),
        cleanup=c.CleanupSettings(),
        lease_ttl_s=3600.0,
        top_up=c.TopUpSettings(
            samples=args.samples, prompts=str(args.work / "train.jsonl"), concurrency=args.concurrency,
            temperature=args.temperature, max_new_tokens=args.answer,
        ),
        training=c.TrainingSettings(
            name="speculators",
            command=["{python}", "{bundle}/hsx_train/speculators_eagle3.py", "--verifier-name-or-path", "{model}",
                     "--data-path", "{data}", "--save-path", "{checkpoints}", "--target-layer-ids", "{layers}",
                     *args.train_args.split()],
            format="speculators_v1",
            root=str(args.work / "drafters"),
            python=args.trainer_python,
            env={
                "HF_HUB_OFFLINE": "1",
                **({k: v for k, v in CPU_ENV.items() if k != "PYTHONPATH"} if cpu else {}),
                **({"PYTHONPATH": args.trainer_path} if args.trainer_path else {}),
            },
            acceptance=c.AcceptanceSettings(
                server=server(args.port + 10, few), prompts=str(args.work / "held_out.jsonl"),
                samples=args.held_out, output_tokens=64, concurrency=1, steps=args.steps,
                draft_env={"TRITON_INTERPRET": "1"} if cpu else {},
            ),
        ),
    )  # fmt: skip


def moved(settings: c.AcceptanceSettings, number: int) -> c.AcceptanceSettings:
    """The same on a port of its own; SGLang takes ports behind it too."""
    port = settings.server.port + 20 * number
    args = list(settings.server.args)
    args[args.index("--port") + 1] = str(port)
    return replace(settings, server=replace(settings.server, args=args, port=port))
