"""What the DAG file has to know of each profile when Airflow parses it: its hosts, their pools, and when it runs.

Read leniently: a profile with a mistake elsewhere keeps its DAG, so that its nights fail loudly, in ``plan``, with
every mistake named; one whose hosts or nights can't be read gets a DAG without a schedule that says so.

From a shell: ``python -m hsx_operators.shapes`` prints the pools of all profiles, for ``airflow pools import``.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from hsx_operators.errors import ProfileError
from hsx_operators.hosts import POOL, host_bodies
from hsx_operators.problems import path_of, problem
from hsx_operators.profile_files import expanded, list_profiles, read_body
from hsx_operators.unattended import Alerts, Nightly

M = TypeVar("M", bound=BaseModel)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class HostShape:
    """One host of a profile: its name ("" for the only one) and its pool."""

    name: str = ""
    pool: str = POOL


@dataclass(frozen=True)
class Shape:
    """A profile as the DAG file sees it. ``problem``: why it could not be read; then it has one host and no nights."""

    profile: str
    hosts: tuple[HostShape, ...] = (HostShape(),)
    nightly: Nightly = field(default_factory=Nightly)
    alerts: Alerts = field(default_factory=Alerts)
    problem: str = ""

    @property
    def own_dag(self) -> bool:
        """Whether the profile has a DAG of its own: for its hosts or its pool, its schedule or its deadline, or to tell
        its problem."""
        timed = bool(self.nightly.schedule or self.alerts.deadline_hours)
        return not self.in_form or timed or bool(self.problem)

    @property
    def in_form(self) -> bool:
        """Whether the form over several profiles can run it: its tasks are those of one host, in the pool of all."""
        return self.hosts == (HostShape(),)


def shapes() -> list[Shape]:
    """The shape of every profile that exists."""
    return [shape(name) for name in list_profiles()]


def shape(name: str) -> Shape:
    """Read one profile's hosts and nights."""
    try:
        body = read_body(name)
        if not isinstance(body, dict):
            raise ProfileError(f"profile {name}", ["is no mapping"])
        found, _ = expanded({k: v for k, v in body.items() if k in ("host", "hosts", "nightly", "alerts")})
        try:
            bodies = host_bodies(found)
            nightly = _part(name, "nightly", Nightly, found)
            alerts = _part(name, "alerts", Alerts, found)
        except ValueError as e:
            raise ProfileError(f"profile {name}", [str(e)]) from None
    except Exception as e:  # whatever is wrong with one file, the others keep their DAGs
        log.error("%s", e)
        return Shape(name, problem=str(e) or type(e).__name__)
    hosts = []
    for _, one in bodies:
        host: dict[str, Any] = one["host"] if isinstance(one.get("host"), dict) else {}
        hosts.append(HostShape(str(host.get("name", "")) if len(bodies) > 1 else "", str(host.get("pool") or POOL)))
    return Shape(name, tuple(hosts), nightly, alerts)


def _part(profile: str, key: str, model: type[M], found: dict[str, Any]) -> M:
    """One section of a profile; ProfileError names what is wrong with it."""
    try:
        return model.model_validate(found.get(key) or {})
    except ValidationError as e:
        lines = [problem(d, f"{key}.{path_of(d['loc'])}", model) for d in e.errors()]
        raise ProfileError(f"profile {profile}", lines) from None


def alerts_as_written(name: str) -> dict[str, Any]:
    """A profile's section ``alerts`` as it stands in the file, its variables not replaced: fit for an XCom."""
    body = read_body(name)
    section = body.get("alerts") if isinstance(body, dict) else None
    # YAML reads the key ``on`` as a boolean
    return {"on" if key is True else str(key): value for key, value in section.items()} if section else {}


def alerts_from(section: dict[str, Any], profile: str) -> Alerts:
    """The settings that ``alerts_as_written`` stands for, with the variables of here; ProfileError names mistakes."""
    return _part(profile, "alerts", Alerts, expanded({"alerts": section})[0])


def pools() -> dict[str, dict[str, object]]:
    """One slot a host, deferred tasks counted, as ``airflow pools import`` reads it."""
    return {
        host.pool: {"slots": 1, "description": "hsx: one server state a host", "include_deferred": True}
        for one in shapes()
        for host in one.hosts
    }


if __name__ == "__main__":
    print(json.dumps(pools(), indent=2))
