"""The data sets, from the hand-offs to training and the plans of runs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_page.reading import Handed, Run

Key = tuple[str, str]


def datasets_of(
    handed: Sequence[Handed],
    runs: Sequence[Run],
    facts: Mapping[Key, Mapping[str, Any]],
    verified: Mapping[Key, Mapping[str, Any]],
    consumers: Mapping[Key, Sequence[Mapping[str, Any]]],
    shown: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """One entry a data set, the one that changed last first.

    :param handed: hand-offs, newest first.
    :param facts: plan's XComs by run: a data set that nobody has handed off yet is known from there.
    :param verified: verify's result by run.
    :param consumers: DAG runs that a hand-off started, by the run that handed off.
    :param shown: the run that the page shows: how far it has come is known.
    """
    found: dict[str, dict[str, Any]] = {}
    for one in handed:
        h = one.handoff
        name = str(h.get("dataset_id") or "")
        if not name or name in found:
            continue
        check = verified.get((one.dag_id, one.run_id), {})
        found[name] = {
            "dataset_id": name, "handed_off": True, "at": one.at, "dag_id": one.dag_id, "run_id": one.run_id,
            "samples": h.get("samples"), "tokens": h.get("tokens"), "bytes": h.get("bytes"),
            "formats": h.get("formats") or {}, "layers": h.get("layers") or [], "model": h.get("model") or {},
            "engine": h.get("engine") or {}, "dir": h.get("dataset_dir", ""), "handoff": h.get("path", ""),
            "manifest_sha256": h.get("manifest_sha256", ""), "commands": h.get("commands") or {},
            "proved": check.get("proved"), "failed": check.get("failed"),
            "consumers": list(consumers.get((one.dag_id, one.run_id), [])),
        }  # fmt: skip
    for run in runs:
        plan, settings = (facts.get((run.dag_id, run.run_id), {}).get(k) for k in ("plan", "run"))
        if not isinstance(plan, dict) or (isinstance(settings, dict) and settings.get("dry_run")):
            continue
        name = str(plan.get("dataset_id") or "")
        if name and name not in found:
            made = None
            if shown and (shown["dag_id"], shown["run_id"]) == (run.dag_id, run.run_id):
                made = shown["totals"]
            found[name] = {
                "dataset_id": name, "handed_off": False, "at": run.began, "dag_id": run.dag_id, "run_id": run.run_id,
                "samples": plan["done"] + (made["samples"] if made else 0), "planned": plan["done"] + plan["todo"],
                "tokens": made["tokens"] if made and not plan["done"] else None,
                "bytes": made["bytes"] if made and not plan["done"] else None,
                "formats": {}, "layers": [], "model": {}, "engine": {}, "dir": plan["dataset_dir"], "handoff": "",
                "manifest_sha256": "", "commands": {}, "proved": None, "failed": None, "consumers": [],
            }  # fmt: skip
    return sorted(found.values(), key=lambda d: -(d["at"] or 0.0))
