"""What a run would do, in figures and in sentences: the answer of a dry run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_operators.answers import human_bytes, human_seconds

#: XCom of the gate: what the run would do, or is about to do.
FORETOLD = "hsx_foretold"


def foretell(
    run: Mapping[str, Any], plan: Mapping[str, Any], shards: Sequence[Mapping[str, Any]], disk: Mapping[str, Any]
) -> dict[str, Any]:
    """Figures for the page, and ``lines`` for a person.

    :param run: plan's XCom ``run``.
    :param plan: plan's XCom ``plan``; its ``pace`` is what the host has measured, or None.
    :param shards: those with something to do.
    :param disk: the disk check's verdict.
    """
    pace: Mapping[str, Any] = plan.get("pace") or {}
    extract_s = plan["todo_tokens"] / pace["tok_s"] if pace and pace["tok_s"] else None
    down_s = extract_s + pace["overhead_s"] if pace and extract_s is not None and pace["overhead_s"] else None
    deletes = list(disk["old_states"]) if disk["verdict"] == "cleanup" and run["cleanup_policy"] != "never" else []
    return {
        "samples": plan["todo"],
        "done": plan["done"],
        "shards": len(shards),
        "tokens": plan["todo_tokens"],
        "bytes": plan["todo_bytes"],
        "dataset_id": plan["dataset_id"],
        "dataset_dir": plan["dataset_dir"],
        "tok_s": pace["tok_s"] if pace else None,
        "extract_s": extract_s,
        "down_s": down_s,
        "needed_bytes": disk["needed_bytes"],
        "free_bytes": disk["free_bytes"],
        "reserve_bytes": disk["reserve_bytes"],
        "verdict": disk["verdict"],
        "policy": run["cleanup_policy"],
        "deletes": [{k: old[k] for k in ("path", "bytes", "files")} for old in deletes],
        "lines": _lines(run, plan, shards, disk, deletes, extract_s, down_s),
    }


def nothing_to_do(plan: Mapping[str, Any]) -> str:
    """Why a run has nothing to extract: all is published, or nothing of what was asked for is left."""
    if plan["done"] < plan["valid"]:
        where = f"where {plan['done']:,} of the {plan['valid']:,} samples of {plan['dataset_id']} are published"
        return f"Nothing to do in the shards that were asked for, {where}."
    return f"Nothing to do: all {plan['done']:,} samples of {plan['dataset_id']} are published."


def _lines(
    run: Mapping[str, Any],
    plan: Mapping[str, Any],
    shards: Sequence[Mapping[str, Any]],
    disk: Mapping[str, Any],
    deletes: Sequence[Mapping[str, Any]],
    extract_s: float | None,
    down_s: float | None,
) -> list[str]:
    if not plan["todo"]:
        return [f"{nothing_to_do(plan)} Production would not be touched."]
    lines = [
        f"Would extract {plan['todo']:,} samples in {len(shards):,} shards: {plan['todo_tokens']:,} tokens, "
        f"{human_bytes(plan['todo_bytes'])}; {plan['done']:,} samples are done."
    ]
    pace: Mapping[str, Any] = plan.get("pace") or {}
    if extract_s is None:
        lines.append("How long it would take is not known: this profile has not extracted on this host yet.")
    else:
        lines.append(f"Extraction would take {human_seconds(extract_s)} at the measured {pace['tok_s']:,.0f} tokens/s.")
    if down_s is not None:
        lines.append(
            f"Production would be down for about {human_seconds(down_s)}: the extraction, and "
            f"{human_seconds(pace['overhead_s'])} to stop, start, prove, verify and restore, as the last time."
        )
    lines.append(f"{disk['text'][:1].upper()}{disk['text'][1:].rstrip('.')}.")
    if deletes:
        how = "after a person's approval" if run["cleanup_policy"] == "ask" else "without asking"
        size = human_bytes(sum(old["bytes"] for old in deletes))
        folders = "one folder" if len(deletes) == 1 else f"{len(deletes)} folders"
        lines.append(f"Would delete {folders} of old states, {size}, {how} and after the probe.")
    elif disk["verdict"] == "fits":
        lines.append("Nothing would be deleted.")
    else:
        lines.append("The run would stop at the disk check, before anything is touched.")
    return lines
