"""The data sets, from the hand-offs to training and the plans of runs. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_page.reading import Handed, Run
from hsx_page.unread import Unread, listing, mapping, number

Key = tuple[str, str]


def datasets_of(
    handed: Sequence[Handed],
    runs: Sequence[Run],
    facts: Mapping[Key, Mapping[str, Any]],
    verified: Mapping[Key, Mapping[str, Any]],
    consumers: Mapping[Key, Sequence[Mapping[str, Any]]],
    shown: Mapping[str, Any] | None = None,
    unread: Unread | None = None,
) -> list[dict[str, Any]]:
    """One entry a data set, the one that changed last first.

    :param handed: hand-offs, newest first.
    :param facts: plan's XComs by run: a data set that nobody has handed off yet is known from there.
    :param verified: verify's result by run.
    :param consumers: DAG runs that a hand-off started, by the run that handed off.
    :param shown: the run that the page shows: how far it has come is known.
    """
    unread = unread or Unread()
    found: dict[str, dict[str, Any]] = {}
    for one in handed:
        key = (one.dag_id, one.run_id)
        name = str(one.handoff.get("dataset_id") or "")
        if name and name not in found:
            found[name] = _handed(name, one, verified.get(key, {}), list(consumers.get(key, [])))
    for run in runs:
        key = (run.dag_id, run.run_id)
        plan, settings = (mapping(facts.get(key, {}).get(k)) for k in ("plan", "run"))
        name = str(plan.get("dataset_id") or "")
        if name and name not in found and not settings.get("dry_run"):
            made = shown["totals"] if shown and (shown["dag_id"], shown["run_id"]) == key else None
            what = f"the data set {name} in the plan of {run.dag_id} {run.run_id}"
            if (planned := unread.part(what, None, _planned, name, run, plan, made)) is not None:
                found[name] = planned
    return sorted(found.values(), key=lambda d: -(d["at"] or 0.0))


def _handed(name: str, one: Handed, check: Mapping[str, Any], consumers: list[Mapping[str, Any]]) -> dict[str, Any]:
    h = one.handoff
    return {
        "dataset_id": name, "handed_off": True, "at": one.at, "dag_id": one.dag_id, "run_id": one.run_id,
        "samples": number(h.get("samples")), "tokens": number(h.get("tokens")), "bytes": number(h.get("bytes")),
        "formats": mapping(h.get("formats")), "layers": listing(h.get("layers")), "model": mapping(h.get("model")),
        "engine": mapping(h.get("engine")), "dir": str(h.get("dataset_dir", "")), "handoff": str(h.get("path", "")),
        "manifest_sha256": str(h.get("manifest_sha256", "")), "commands": mapping(h.get("commands")),
        "proved": check.get("proved"), "failed": check.get("failed"), "consumers": consumers,
    }  # fmt: skip


def _planned(name: str, run: Run, plan: Mapping[str, Any], made: Mapping[str, Any] | None) -> dict[str, Any]:
    done, todo = int(plan["done"]), int(plan["todo"])
    return {
        "dataset_id": name, "handed_off": False, "at": run.began, "dag_id": run.dag_id, "run_id": run.run_id,
        "samples": done + (made["samples"] if made else 0), "planned": done + todo,
        "tokens": made["tokens"] if made and not done else None,
        "bytes": made["bytes"] if made and not done else None,
        "formats": {}, "layers": [], "model": {}, "engine": {}, "dir": str(plan["dataset_dir"]), "handoff": "",
        "manifest_sha256": "", "commands": {}, "proved": None, "failed": None, "consumers": [],
    }  # fmt: skip
