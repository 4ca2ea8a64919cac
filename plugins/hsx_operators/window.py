"""The window of a night: until when a run may extract, and how a step ends that comes too late to borrow the host."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

from hsx_operators.errors import ConfigError
from hsx_operators.unattended import Nightly

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

#: Runs that start by themselves have the profile's window.
BY_ITSELF = ("scheduled", "backfill", "asset_triggered")


def window_end(nightly: Nightly, param: str, run_type: str, now: float) -> float:
    """When extraction ends, in unix seconds; 0 for no end.

    :param param: the run's Param ``stop_after``, "05:00" in the profile's time zone; it wins.
    :param run_type: Airflow's; a person's run without the Param has no window.
    :param now: the window ends the next time after this that the clock shows it.
    """
    clock = param or (nightly.stop_after if run_type in BY_ITSELF else "")
    if not clock:
        return 0.0
    try:
        at = datetime.strptime(clock, "%H:%M").time()
    except (TypeError, ValueError):
        raise ConfigError("is not a time of day", field="stop_after", value=clock, fix="write it as 05:00") from None
    here = datetime.fromtimestamp(now, ZoneInfo(nightly.timezone))
    # fold: the clock that is set back shows a time twice
    times = [(here.date() + timedelta(days=day), at.replace(fold=fold)) for day in (0, 1) for fold in (0, 1)]
    ends = (datetime.combine(day, time_, here.tzinfo).timestamp() for day, time_ in times)
    return next(end for end in ends if end > now)


def end_for(nightly: Nightly, param: str, dag_run: Any) -> float:
    """``window_end`` of one run: a night that begins late, after its DAG was paused, ends at its own end and not at the
    next night's."""
    kind = str(getattr(dag_run.run_type, "value", dag_run.run_type))
    return window_end(nightly, param, kind, dag_run.run_after.timestamp() if kind == "scheduled" else time.time())


def end_of(context: Context, host: dict[str, Any]) -> float:
    """The run's window as a step sees it: a person who clears a task of an ended run wants it done, at any hour."""
    if getattr(context["dag_run"], "clear_number", 0):
        return 0.0
    return float(host.get("stop_after") or 0.0)


def ended(context: Context, host: dict[str, Any], ahead_s: float = 0.0) -> bool:
    """Whether the window has ended, or will within ``ahead_s``."""
    end = end_of(context, host)
    return bool(end) and time.time() + ahead_s >= end


def left_over(host: Any) -> bool:
    """Whether the run's window has ended, cleared or not: what it has left undone is the next run's, and no fault of a
    shard that a person clears by day. For the steps that judge and hand on; they extract nothing.

    :param host: plan's XCom ``run``, or what stands in its place.
    """
    end = float(host.get("stop_after") or 0.0) if isinstance(host, dict) else 0.0
    return bool(end) and time.time() >= end


def clock_of(end: float) -> str:
    """The end of a window as the log tells it."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(end))


def rest_of(context: Context, group: str) -> Sequence[Any]:
    """What would follow a step that skips: all of it but the teardowns, of one host's group only where it has one."""
    rest = context["task"].get_flat_relatives(upstream=False)
    return [t for t in rest if not t.is_teardown and (not group or t.task_id.startswith(f"{group}."))]
