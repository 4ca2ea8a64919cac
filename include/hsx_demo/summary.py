"""What a run did, in words and figures, read from Airflow as anybody can read it: task states and XComs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from hsx_demo.client import AirflowClient, Task
from hsx_demo.stack import DAG_ID, TRAINING_DAG_ID
from hsx_operators.answers import human_bytes


def text(client: AirflowClient, run_id: str, state: str) -> str:
    """The whole summary of one run."""
    tasks = client.tasks(DAG_ID, run_id)

    def result(task_id: str, key: str = "return_value") -> Any:
        return client.xcom(DAG_ID, run_id, task_id, key)

    shards = [
        client.xcom(DAG_ID, run_id, t.task_id, map_index=t.map_index)
        for t in sorted(tasks, key=lambda t: t.map_index)
        if t.task_id == "extract" and t.map_index >= 0
    ]
    parts = [f"run {run_id}: {state}", *stage_lines(tasks)]
    parts += data_lines(result("top_up", "plan"), [s for s in shards if s], result("probe"), result("verify"))
    parts += production_lines(result("restore"), result("benchmark_before"), result("benchmark_after"))
    parts += handoff_lines(result("handoff"))
    return "\n".join(parts)


def stage_lines(tasks: Sequence[Task]) -> list[str]:
    """One line a task in the order in which they started: name, state, seconds."""
    width = max((len(t.name) for t in tasks), default=0)
    ordered = sorted(tasks, key=lambda t: (_instant(t.start), t.task_id, t.map_index))
    lines = [f"  {t.name:<{width}}  {t.state or 'none':<9} {t.seconds:7.1f} s" for t in ordered]
    starts, ends = [_instant(t.start) for t in tasks if t.start], [_instant(t.end) for t in tasks if t.end]
    if starts and ends:
        lines.append(f"  {'first start to last end':<{width}}  {'':<9} {max(ends) - min(starts):7.1f} s")
    return lines


def data_lines(
    plan: Mapping[str, Any] | None,
    shards: Sequence[Mapping[str, Any]],
    probe: Mapping[str, Any] | None,
    verify: Mapping[str, Any] | None,
) -> list[str]:
    """What was to do, what was extracted at which rate, and what proves it."""
    lines = []
    if plan:
        lines.append(
            f"plan        {plan['rows']:,} rows, {plan['rejected']} rejected, {plan['done']} done before; to do: "
            f"{plan['todo']} samples, {plan['todo_tokens']:,} tokens, {human_bytes(plan['todo_bytes'])}"
        )
    if probe:
        lines.append(f"probe       {probe['cases']} cases right in {probe['seconds']:.1f} s")
    if shards:
        tokens, seconds = sum(s["tokens"] for s in shards), sum(s["seconds"] for s in shards)
        rate = f", {tokens / seconds:,.0f} tok/s" if seconds else ""
        extracted, failed = sum(s["extracted"] for s in shards), sum(s["failed"] for s in shards)
        lines.append(
            f"extracted   {extracted} samples in {len(shards)} shards, {tokens:,} tokens, "
            f"{human_bytes(sum(s['bytes'] for s in shards))} in {seconds:.1f} s{rate}; {failed} failed"
        )
        lines += [f"proof       {s['name']}: {s['proof']}" for s in shards]
    if verify:
        lines.append(
            f"verified    {verify['samples']} samples, {verify['tokens']:,} tokens, {human_bytes(verify['bytes'])} read"
            f"; {verify['missing']} missing, {verify['failed']} failed, {verify['proved']} proved by their next token"
        )
    return lines


def production_lines(
    restored: Mapping[str, Any] | None, before: Mapping[str, Any] | None, after: Mapping[str, Any] | None
) -> list[str]:
    """How production stands, and how fast it is compared with before."""
    lines = []
    if restored:
        lines.append(
            f"production  up again on port {restored['port']}, "
            f"pid {restored['pid']}, ready after {restored['ready_s']:.0f} s"
        )
    for when, result in (("before", before), ("after", after)):
        if result:
            figures = "; ".join(
                f"{name} {load['output_tok_s']:.1f} tok/s, TTFT {load['ttft_ms']:.0f} ms"
                for name, load in result["loads"].items()
            )
            lines.append(f"  {when:<8}  {figures}")
    if after:
        lines.append(f"  compared  {after['text']}")
    return lines


def handoff_lines(handoff: Mapping[str, Any] | None) -> list[str]:
    """Where the data set is, and what a trainer is told."""
    if not handoff:
        return []
    lines = [f"data set    {handoff['dataset_dir']}", f"handoff     {handoff['path']}"]
    lines += [f"  {name:<15} {where}" for name, where in handoff["formats"].items()]
    lines.append(f"  layers {handoff['layers']}, final {handoff['final']}")
    lines += [f"  {name}: {command}" for name, command in handoff["commands"].items()]
    return lines


def training_lines(client: AirflowClient, run_id: str, state: str) -> list[str]:
    """A training run: its tasks, the drafter, and what the target accepts of it."""
    lines = [f"run {run_id}: {state}", *stage_lines(client.tasks(TRAINING_DAG_ID, run_id))]
    trained = client.xcom(TRAINING_DAG_ID, run_id, "train", map_index=0)
    if trained:
        lines.append(f"drafter     {trained['drafter']} after {trained['training']['seconds']:.0f} s")
    told = client.xcom(TRAINING_DAG_ID, run_id, "acceptance", map_index=0)
    if told and told["acceptance"]:
        lines.append(f"acceptance  {told['acceptance']['text']}")
    return lines


def _instant(iso: str) -> float:
    """Seconds of an ISO time; what never started sorts last."""
    return datetime.fromisoformat(iso).timestamp() if iso else float("inf")
