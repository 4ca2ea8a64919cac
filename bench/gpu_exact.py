"""Captured rows against Hugging Face on the same random weights, on a GPU: one JSON line a model and case.

Models: qwen3, and the DeepSeek-V3 architecture (MLA, mixture of experts), which no CPU serves. For each: prompts of 1,
2, 19, chunk-1, chunk, chunk+1, 2*chunk+1 and 3000 tokens alone, then 16 at once. Each plane must be nearest to the
layer that was asked for and within bf16 error of it; the final state before the norm likewise; the next token must be
the argmax of head(norm(final)), or tied with it in bf16.

Usage: python bench/gpu_exact.py --work /tmp/hsx-exact
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "system")]

import torch  # noqa: E402
from capture_client import Client, Reference  # noqa: E402
from gpu_servers import GPU_FLAGS  # noqa: E402
from sglang_server import CAPTURE, Server, free_port, wait_healthy  # noqa: E402

CHUNK, VOCAB = 1024, 4096
# Relative error of a plane's median row: bf16 makes 0.01 to 0.03 of it, neighbours among these random layers are ten
# times farther apart. The median, because that noise sends some tokens of a mixture to another expert, in one engine
# and not in the other.
ALLOWED = 0.05
LAYERS = [1, 3, 5]
FOR_SGLANG = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 1024, "num_hidden_layers": 6, "max_position_embeddings": 8192,
    "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "initializer_range": 0.05,
    "rms_norm_eps": 1e-6, "dtype": "bfloat16",
}  # fmt: skip


def main() -> int:
    """Run all models; exit 1 where a case is off."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--work", type=Path, required=True)
    p.add_argument("--models", nargs="+", default=["qwen3", "deepseek_v3"], choices=["qwen3", "deepseek_v3"])
    p.add_argument("--server-args", default="", help="more flags for the server, separated by spaces")
    args = p.parse_args()
    bad = 0
    for kind in args.models:
        folder = args.work / kind
        folder.mkdir(parents=True, exist_ok=True)
        bad += check(kind, build(kind, folder / "model"), folder, args.server_args.split())
    return 1 if bad else 0


def build(kind: str, folder: Path, device: str = "cpu", **sizes: int) -> Path:
    """A random checkpoint, made on ``device`` and written by transformers; ``sizes`` change the config's."""
    import transformers

    torch.manual_seed(0)
    config: Any
    if kind == "qwen3":
        own: dict[str, Any] = {
            "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64, "intermediate_size": 2048,
        }  # fmt: skip
        config = transformers.Qwen3Config(**COMMON | own | sizes)
    else:
        own = {
            "num_attention_heads": 16, "num_key_value_heads": 16, "intermediate_size": 2048,
            "moe_intermediate_size": 512, "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 512, "kv_lora_rank": 512,
            "qk_rope_head_dim": 64, "qk_nope_head_dim": 128, "v_head_dim": 128, "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }  # fmt: skip
        config = transformers.DeepseekV3Config(**COMMON | own | sizes)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1.0 + 0.2 * torch.randn(parameter.shape, device=device))
    model.save_pretrained(folder)
    if kind == "deepseek_v3":  # SGLang reads it from the config, newer transformers leave it out
        config_file = folder / "config.json"
        config_file.write_text(json.dumps(json.loads(config_file.read_text()) | FOR_SGLANG))
    return folder


def check(kind: str, model: Path, folder: Path, more: list[str]) -> int:
    """Serve one model with the plugin and compare; the number of cases that are off."""
    spool = folder / "spool"
    spool.mkdir(exist_ok=True)
    client = Client(spool, LAYERS, int(COMMON["hidden_size"]), int(COMMON["num_hidden_layers"]))
    client.write_spec(ring_bytes=64 << 20, writers=4)
    client.server = serve(model, client.spec, folder / "server.log", more)
    try:
        for ready in client.ready():
            print(json.dumps({"model": kind, "ready": ready}), flush=True)
        reference = CudaReference(model)
        lengths = [1, 2, 19, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK + 1, 3000]
        bad = 0
        for n in lengths:
            bad += compare(kind, f"alone {n}", client, reference, [prompt(n, n)])
        together = [prompt(100 + i, 40 + 97 * i) for i in range(16)]
        return bad + compare(kind, "16 at once", client, reference, together)
    finally:
        client.server.stop()


class CudaReference(Reference):
    """The same, on the GPU."""

    def __init__(self, model: Path) -> None:
        super().__init__(model)
        self.model.to("cuda")

    @torch.no_grad()
    def states(self, ids: Any) -> tuple[list[torch.Tensor], torch.Tensor]:
        out = self.model(torch.tensor([list(ids)], device="cuda"), output_hidden_states=True, use_cache=False)
        assert self._before is not None
        return [h[0].cpu() for h in out.hidden_states[:-1]], self._before.cpu()


def compare(kind: str, case: str, client: Client, reference: Reference, prompts: list[list[int]]) -> int:
    """Capture prompts at once, compare each with the reference; 1 where one is off."""
    with ThreadPoolExecutor(len(prompts)) as pool:
        captured = list(pool.map(client.capture, prompts))
    worst, ties, problems = 0.0, 0, []
    for ids, (planes, record, token) in zip(prompts, captured, strict=True):
        if record["rows"] != len(ids):
            problems.append(f"{len(ids)} sent, {record['rows']} dumped")
        states, before = reference.states(ids)
        for plane, layer in zip(planes, LAYERS, strict=False):
            errors = [error(plane, state) for state in states]
            worst = max(worst, errors[layer])
            if errors.index(min(errors)) != layer or errors[layer] > ALLOWED:
                problems.append(f"{len(ids)} tokens, layer {layer}: nearest {errors.index(min(errors))}, {errors}")
        worst = max(worst, error(planes[-1], before))
        if error(planes[-1], before) > ALLOWED:
            problems.append(f"{len(ids)} tokens, final: off by {error(planes[-1], before):.4f}")
        logits = reference.next_logits(planes[-1][-1].to("cuda"))
        gap = float(logits.max() - logits[token])
        ties += gap > 0
        if gap > 2**-6 * float(logits.abs().max()):
            problems.append(f"{len(ids)} tokens: next token {token} is {gap:.4f} below the best")
    line = {"model": kind, "case": case, "worst_error": round(worst, 5), "ties": ties, "ok": not problems}
    print(json.dumps(line | ({"problems": problems[:4]} if problems else {})), flush=True)
    return 1 if problems else 0


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """The median over rows of ||got - want|| / ||want||."""
    got, want = got.float(), want.float()
    return float(((got - want).norm(dim=-1) / want.norm(dim=-1)).median())


def serve(model: Path, spec: Path, log: Path, more: list[str]) -> Server:
    """A server with the plugin on this GPU."""
    port = free_port()
    path = os.pathsep.join(p for p in (str(CAPTURE), os.environ.get("PYTHONPATH", "")) if p)
    command = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model), "--host", "127.0.0.1",
        "--port", str(port), "--dtype", "bfloat16", *GPU_FLAGS, "--disable-radix-cache",
        "--chunked-prefill-size", str(CHUNK),
        "--mem-fraction-static", "0.3", "--max-total-tokens", "65536", *more,
    ]  # fmt: skip
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=os.environ | {"PYTHONPATH": path, "HSX_CAPTURE_SPEC": str(spec)},
            stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
    server = Server(process, port, log)
    try:
        began = time.monotonic()
        wait_healthy(server, 300)
        print(json.dumps({"model": str(model), "ready_s": round(time.monotonic() - began, 1)}), flush=True)
    except BaseException:
        server.stop()
        raise
    return server


def prompt(seed: int, length: int, vocab: int = VOCAB) -> list[int]:
    """Random ids without the special ones."""
    import random

    rng = random.Random(seed)
    return [rng.randrange(4, vocab) for _ in range(length)]


if __name__ == "__main__":
    raise SystemExit(main())
