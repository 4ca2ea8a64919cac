"""The hosts of one profile: from their list to one document a host, and how shards are spread over them. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping, Sequence
from typing import Any

#: The pool of a profile's only host; of several, each has ``<POOL>_<name>`` unless it names one. One slot each.
POOL = "hsx_gpu_host"
HOST_NAME = r"^[A-Za-z0-9_-]{0,64}$"
#: The form over all profiles of one host, and the beginning of the id of a profile's own DAG.
DAG_ID = "hsx_extraction"
#: What an entry of ``hosts`` may change of the profile's.
OWN = ("production", "extraction")
#: The group of tasks that do what a failed host left; no host bears this name.
TAKE_OVER = "take_over"
#: Ids that the DAG has beside the groups of its hosts; no host bears one of these names either.
STEPS = (
    "plan", "top_up", "disk_check", "gate", "approve_cleanup", "reassign", "convert", "handoff", "verdict",
)  # fmt: skip


def dag_id_of(profile: str) -> str:
    """The id of a profile's own DAG: of one that lists several hosts, or runs by itself."""
    return f"{DAG_ID}__{profile}"


def host_bodies(body: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """A profile's document as one document a host, each with the place of its host in the file (``hosts[1]``).

    :raises ValueError: where the list itself can't be read.
    """
    if "hosts" not in body:
        return [("host", body)]
    hosts = body["hosts"]
    if "host" in body:
        raise ValueError("hosts: stands beside host (keep one of them: host for one, hosts for several)")
    if not isinstance(hosts, list) or not hosts or not all(isinstance(h, dict) for h in hosts):
        raise ValueError(f"hosts = {hosts!r}: is not a list of hosts (write - name: ..., ssh_conn_id: ... for each)")
    names = [h.get("name") for h in hosts]
    for i, name in enumerate(names):
        if not isinstance(name, str) or not re.fullmatch(HOST_NAME, name) or not name:
            raise ValueError(f"hosts[{i}].name = {name!r}: is no host's name (use up to 64 letters, digits, _ and -)")
        if name in (TAKE_OVER, *STEPS):
            raise ValueError(f"hosts[{i}].name = {name!r}: is the name of a step (give the host another one)")
        if names.index(name) != i:
            raise ValueError(f"hosts[{i}].name = {name!r}: is there twice (give each host a name of its own)")
    common = {k: v for k, v in body.items() if k != "hosts"}
    made = []
    for i, entry in enumerate(hosts):
        host = {"pool": f"{POOL}_{entry['name']}", **{k: v for k, v in entry.items() if k not in OWN}}
        one: dict[str, Any] = {**common, "host": host}
        for room in OWN:
            if room in entry:
                own, shared = entry[room], common.get(room, {})
                one[room] = {**shared, **own} if isinstance(own, dict) and isinstance(shared, dict) else own
        made.append((f"hosts[{i}]", one))
    _each_once([one for _, one in made])
    return made


def _each_once(bodies: Sequence[Mapping[str, Any]]) -> None:
    """Refuse one host under two names: both would hold its one lease, or stop and start its one production server.

    Two servers of one host are two hosts, each with a home and a port of its own.
    """
    seen: dict[tuple[str, str, str], int] = {}
    for i, one in enumerate(bodies):
        host, production = one["host"], one.get("production")
        home, conn = host.get("home"), host.get("ssh_conn_id")
        own = {"home": posixpath.normpath(home) if isinstance(home, str) else None}
        own["production.port"] = production.get("port") if isinstance(production, dict) else None
        for field, value in own.items():
            first = seen.setdefault((str(conn), field, str(value)), i) if conn and value is not None else i
            if first != i:
                raise ValueError(
                    f"hosts[{i}].{field} = {value!r}: is that of hosts[{first}], on the same ssh_conn_id {conn!r}: one "
                    "host would be borrowed twice (list each host once; two servers of one host need a home and a "
                    "production.port each)"
                )


def moved(path: str, prefix: str, body: dict[str, Any]) -> str:
    """Where a field of one host's document stands in the file."""
    if prefix == "host":
        return path
    room, _, field = path.partition(".")
    if room == "host":
        return f"{prefix}.{field}" if field else prefix
    entry = body["hosts"][int(prefix[6:-1])]
    own = entry.get(room) if room in OWN else None
    if own is not None and (not isinstance(own, dict) or not field or re.split(r"[.\[]", field)[0] in own):
        return f"{prefix}.{path}"
    return path


def spread(shards: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> dict[str, list[Mapping[str, Any]]]:
    """Which host does which shards: the largest first, each to the host with the fewest tokens so far.

    :param shards: entries of plan's ``shards``; ``id`` and ``tokens`` are read.
    :returns: for each host its shards, ascending; hosts beyond the number of shards get none.
    """
    shares: dict[str, list[Mapping[str, Any]]] = {host: [] for host in hosts}
    load = dict.fromkeys(hosts, 0)
    for shard in sorted(shards, key=lambda s: (-int(s["tokens"]), int(s["id"]))):
        host = min(hosts, key=lambda h: (load[h], hosts.index(h)))
        shares[host].append(shard)
        load[host] += max(1, int(shard["tokens"]))
    return {host: sorted(share, key=lambda s: int(s["id"])) for host, share in shares.items()}
