"""What it does
  Measures the production server with `sglang.bench_serving` under each load of the profile (random ids of fixed
  lengths) and keeps the result with the run. --label after compares with --label before: the ratio of output tokens a
  second by load. A load below the profile's tolerance is measured again, twice at most, and its best counts; the result
  says where it stays below, which makes the run red.
Result: BenchmarkResult.
Example
  python -m hsx_host benchmark --label before --spec S
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import bench_loads, envfile, inherited, serve, servers, state
from hsx_host.contract import BenchmarkLoad, BenchmarkResult, LoadFigures, RunSpec
from hsx_host.errors import BadInput, TryAgain
from hsx_host.progress import log

HELP = "measure production, before and after"
_TIMEOUT_S = 3600.0
_AGAIN = 2


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--label", required=True, choices=["before", "after"])


def run(spec: RunSpec, args: Namespace) -> BenchmarkResult:
    baseline = state.read_document(BenchmarkResult, _path(spec, "before")) if args.label == "after" else None
    if spec.benchmark.enabled:
        serve.require_production(spec)
    figures = measure(spec) if spec.benchmark.enabled else {}
    for _ in range(_AGAIN):
        slow = too_slow(figures, baseline, spec.benchmark.tolerance)
        if not slow:
            break
        log(f"slower than the baseline, measured again: {', '.join(slow)}")
        figures = faster(figures, measure(spec, slow))
    result = compare(args.label, figures, baseline, spec.benchmark.tolerance)
    state.write_document(_path(spec, args.label), result)
    log(result.text)
    return result


def too_slow(loads: dict[str, LoadFigures], baseline: BenchmarkResult | None, tolerance: float) -> list[str]:
    """The loads in which production lies further below the baseline than tolerated."""
    then = baseline.loads if baseline else {}
    return [
        name
        for name, now in loads.items()
        if name in then and now.output_tok_s < (1 - tolerance) * then[name].output_tok_s
    ]


def faster(a: dict[str, LoadFigures], b: dict[str, LoadFigures]) -> dict[str, LoadFigures]:
    """By load, the faster of two measurements: whatever else the host does only ever slows one down."""
    return a | {name: now for name, now in b.items() if now.output_tok_s > a[name].output_tok_s}


def measure(spec: RunSpec, only: list[str] | None = None) -> dict[str, LoadFigures]:
    """Every load (or those named), one after the other, in one process of bench_serving's."""
    env = servers.environment(
        inherited.for_own_launches(spec).env, spec.production, envfile.variables(spec.production)
    ) | {"HF_HUB_OFFLINE": "1"}
    if key := servers.api_key(spec.production):
        env["OPENAI_API_KEY"] = key  # where bench_serving looks for it: it stands in no command line
    loads = {name: load for name, load in spec.benchmark.loads.items() if only is None or name in only}
    with tempfile.TemporaryDirectory(dir=state.run_dir(spec)) as scratch:
        outputs = {name: Path(scratch) / f"{i}.jsonl" for i, name in enumerate(loads)}
        lines = [arguments(spec, load, outputs[name]) for name, load in loads.items()]
        _bench([spec.host.python, "-P", bench_loads.__file__, json.dumps(lines)], env, scratch)
        return {
            name: parse(outputs[name].read_text() if outputs[name].exists() else "", name, load)
            for name, load in loads.items()
        }


def arguments(spec: RunSpec, load: BenchmarkLoad, output: Path) -> list[str]:
    """The arguments of ``sglang.bench_serving`` for one load."""
    host = spec.production.host if spec.production.host not in ("0.0.0.0", "::") else "127.0.0.1"
    pairs = {
        "--backend": "sglang",
        "--host": host,
        "--port": str(spec.production.port),
        "--model": spec.model.path,
        "--dataset-name": "random-ids",
        "--num-prompts": str(load.prompts),
        "--random-input-len": str(load.input_tokens),
        "--random-output-len": str(load.output_tokens),
        "--random-range-ratio": "1.0",
        "--max-concurrency": str(load.concurrency),
        "--output-file": str(output),
    }
    words = [word for pair in pairs.items() for word in pair]
    return [*words, "--tokenize-prompt", "--disable-tqdm"]


def parse(text: str, name: str, load: BenchmarkLoad) -> LoadFigures:
    """The figures in bench_serving's output file (JSON lines, the last one counts). TryAgain where requests failed."""
    lines = text.strip().splitlines()
    if not lines:
        raise TryAgain(f"bench_serving measured nothing under load {name}", field=f"benchmark.loads.{name}")
    body = json.loads(lines[-1])
    figures = LoadFigures(
        output_tok_s=float(body["output_throughput"]),
        total_tok_s=float(body["total_throughput"]),
        ttft_ms=float(body["mean_ttft_ms"]),
        tpot_ms=float(body["mean_tpot_ms"]),
        completed=int(body["completed"]),
        seconds=float(body["duration"]),
    )
    if figures.completed < load.prompts:
        raise TryAgain(
            f"production answered {figures.completed} of {load.prompts} requests of load {name}",
            field=f"benchmark.loads.{name}",
            value=figures.completed,
            fix="read the server's log",
        )
    return figures


def compare(
    label: str, loads: dict[str, LoadFigures], baseline: BenchmarkResult | None, tolerance: float
) -> BenchmarkResult:
    """The result, with what it says about the baseline. ``tolerance`` 0.05: 0.95 of the baseline is still as before."""
    ratios: dict[str, float] = {}
    lines = []
    for name, now in loads.items():
        then = baseline.loads.get(name) if baseline else None
        text = f"{name}: {now.output_tok_s:.1f} tok/s"
        if then is not None and then.output_tok_s > 0:
            ratios[name] = now.output_tok_s / then.output_tok_s
            text += f", {ratios[name]:.2f} of the baseline {then.output_tok_s:.1f}"
        elif label == "after":
            text += ", no baseline to compare with"
        lines.append(text)
    slow = too_slow(loads, baseline, tolerance) if label == "after" else []
    if slow:
        lines.append(f"slower than {1 - tolerance:.2f} of the baseline: {', '.join(slow)}")
    return BenchmarkResult(
        when=label,
        loads=loads,
        ratios={name: round(ratio, 4) for name, ratio in ratios.items()},
        within_tolerance=not slow,
        text="; ".join(lines) or "the benchmark is switched off",
    )


def _bench(argv: list[str], env: dict[str, str], cwd: str) -> None:
    log(f"bench_serving: {' '.join(argv[1:])}")
    try:
        done = subprocess.run(
            argv, env=env, cwd=cwd, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            text=True, errors="replace", timeout=_TIMEOUT_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise TryAgain(
            f"the benchmark did not end within {_TIMEOUT_S:.0f} s", field="benchmark.loads", fix="make them smaller"
        ) from None
    except FileNotFoundError:
        raise BadInput("no such Python", field="host.python", value=argv[0], fix="name SGLang's Python") from None
    sys.stderr.write(done.stdout[-4000:])
    if done.returncode != 0:
        tail = " | ".join(done.stdout.strip().splitlines()[-3:])
        raise TryAgain(
            f"bench_serving ended with {done.returncode}: {tail[:600]}",
            field="benchmark.loads",
            fix="read the log of this step",
        )


def _path(spec: RunSpec, label: str) -> Path:
    return state.run_dir(spec) / f"benchmark-{label}.json"
