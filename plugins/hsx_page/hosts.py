"""How each host stood when a task last looked. Pure: nobody asks the host for the page's sake."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hsx_page.reading import Sighting
from hsx_page.unread import Unread, mapping, number

Key = tuple[str, str]
GIVES_BACK = ("RestoreProductionOperator", "ExtractShardOperator")


def hosts_of(
    sightings: Sequence[Sighting],
    facts: Mapping[Key, Mapping[str, Any]],
    contacts: Mapping[Key, float],
    unread: Unread | None = None,
) -> list[dict[str, Any]]:
    """One entry a host, by name.

    :param facts: plan's XComs ``run`` and ``plan`` by run.
    :param contacts: when a task of a run last told something: each look at a job renews the lease.
    """
    unread = unread or Unread()
    by_host: dict[str, list[Sighting]] = {}
    for sight in sightings:
        if name := _host_name(sight, facts):
            by_host.setdefault(name, []).append(sight)
    return [_host(name, by_host[name], facts, contacts, unread) for name in sorted(by_host)]


def _host_name(sight: Sighting, facts: Mapping[Key, Mapping[str, Any]]) -> str:
    if isinstance(sight.progress, dict) and sight.progress.get("host"):
        return str(sight.progress["host"])
    run = facts.get((sight.run.dag_id, sight.run.run_id), {}).get("run")
    return str(run.get("ssh_conn_id", "")) if isinstance(run, dict) else ""


def _host(
    name: str,
    seen: Sequence[Sighting],
    facts: Mapping[Key, Mapping[str, Any]],
    contacts: Mapping[Key, float],
    unread: Unread,
) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name, "mode": "unknown", "at": None, "pid": None, "port": None, "healthy": None, "healthy_at": None,
        "changing": "", "lease": None, "dag_id": "", "run_id": "",
    }  # fmt: skip
    for sight in sorted(seen, key=_when):
        what = f"what {sight.task.task_id} of {sight.run.run_id} told of the host {name}"
        instead: dict[str, Any] = {"changing": f"what {sight.task.task_id} told can't be read"}
        if sight.task.operator == "AcquireHostOperator":
            instead["lease"] = {"unread": True}  # not free
        entry |= unread.part(what, instead, _seen, entry, sight, facts, contacts)
    return entry


def _seen(
    before: Mapping[str, Any], sight: Sighting, facts: Mapping[Key, Mapping[str, Any]], contacts: Mapping[Key, float]
) -> dict[str, Any]:
    """The host's entry after one more look."""
    entry, told = dict(before), mapping(sight.told)
    if wrong := {k: told[k] for k in ("expires", "since", "pid", "port") if k in told and number(told[k]) is None}:
        raise ValueError(str(wrong))
    if "mode" in told:
        entry |= {
            "mode": str(told["mode"]), "at": _when(sight), "dag_id": sight.run.dag_id, "run_id": sight.run.run_id,
            "changing": "",
        }  # fmt: skip
        entry["pid"] = told.get("pid") or None
        entry["port"] = told.get("port") or (entry["port"] if told.get("pid") else None)
        if sight.task.operator == "ServerHealthSensor" or told.get("ready_s"):
            entry |= {"healthy": True, "healthy_at": _when(sight)}
        elif told["mode"] == "stopped":
            entry |= {"healthy": None, "healthy_at": None}
    elif sight.task.operator != "AcquireHostOperator" and sight.task.state in ("running", "deferred"):
        progress = mapping(sight.progress)
        entry["changing"] = str(progress.get("text") or sight.task.task_id.replace("_", " "))
    elif sight.task.state == "failed":
        entry["changing"] = f"{sight.task.task_id} failed"
    if sight.task.operator == "AcquireHostOperator" and told.get("run_id"):
        key = (sight.run.dag_id, sight.run.run_id)
        run = facts.get(key, {}).get("run")
        ttl = float(number(mapping(run).get("lease_ttl_s")) or 0.0)
        renewed = max(float(told["expires"]) - ttl, contacts.get(key, 0.0))
        # Airflow's id of the run, which people know and links need; the host's name of it is longer.
        entry["lease"] = {
            "run_id": sight.run.run_id, "dag_id": sight.run.dag_id, "since": told["since"], "renewed": renewed,
            "expires": max(float(told["expires"]), renewed + ttl),
        }  # fmt: skip
    elif sight.task.operator in GIVES_BACK and told.get("mode") == "production":
        entry["lease"] = None
    return entry


def _when(sight: Sighting) -> float:
    return sight.task.ended or sight.task.began or 0.0
