"""The alarm: a restore that has failed for good means that production may be down, and a person has to know now."""

from __future__ import annotations

import logging
import os
import pkgutil
from typing import TYPE_CHECKING

from hsx_operators.base import run_key

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

log = logging.getLogger("airflow.task.hsx_alarm")

#: Dotted path of a callable ``alarm(message: str, context)`` that wakes somebody; Airflow's workers must find it.
ALARM_VARIABLE = "HSX_ALARM"


def production_is_down(context: Context) -> None:
    """``on_failure_callback`` of the restore: tells the task's log, and calls the callable of HSX_ALARM."""
    task = context.get("task")
    key = run_key(getattr(task, "on", ""))
    host = context["ti"].xcom_pull(task_ids=getattr(task, "plan_task_id", "plan"), key=key)
    if not isinstance(host, dict) or "problem" in host:
        return  # the plan never told of this host, or left it out: nobody has borrowed it
    text = message(context, str(host["ssh_conn_id"]))
    log.critical("%s", text)
    path = os.environ.get(ALARM_VARIABLE, "")
    if not path:
        log.warning("nobody is woken: %s is not set", ALARM_VARIABLE)
        return
    try:
        alarm = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as e:
        log.critical("nobody is woken: %s = %r can't be imported: %s", ALARM_VARIABLE, path, e)
        return
    alarm(text, context)


def message(context: Context, conn_id: str) -> str:
    """What the woken person reads: which host, since which run, why, and what to do."""
    ti = context["ti"]
    return (
        f"PRODUCTION MAY BE DOWN on host {conn_id}: {ti.dag_id}, run {ti.run_id}, task {ti.task_id} has not brought it "
        f"back and has no try left: {context.get('exception')}\n"
        "The guards on the host go on trying once the lease has lapsed. By hand, on the host: "
        "python -m hsx_host restore --now (docs/operations.md)"
    )
