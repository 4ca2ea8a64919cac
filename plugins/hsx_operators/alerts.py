"""Telling people: the notifier of a run's profile is called where its ``alerts`` are configured, and never else."""

from __future__ import annotations

import asyncio
import importlib
import logging
import posixpath
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.sdk import BaseNotifier
from airflow.sdk.definitions.callback import AsyncCallback
from airflow.sdk.definitions.deadline import BaseDeadlineReference, DeadlineAlert

from hsx_operators.base import run_key
from hsx_operators.errors import ConfigError, HostHeld, HostTryAgain
from hsx_operators.retry import tries_before
from hsx_operators.shapes import alerts_as_written, alerts_from
from hsx_operators.unattended import Alerts, Event

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

log = logging.getLogger(__name__)


def tell(context: Context, event: Event, text: str) -> None:
    """Tell the notifier of the run's profile, as frozen. An alert that can't be sent is logged and fails nothing.

    :param text: what happened, for ``{{ alert_text }}``.
    """
    try:
        alerts = _of_run(context)
        if alerts.notifier and event in alerts.on:
            _send(alerts, {**context, "alert": event, "alert_text": text})
    except Exception:
        log.exception("the alert %s was not sent: %s", event, text)


def _of_run(context: Context) -> Alerts:
    """What the plan froze: a profile that somebody edits while production is down must not keep the alert from them.
    Before there is a plan, what the file says now; mistakes elsewhere in it don't matter."""
    profile = str(context["params"]["profile"])
    run = context["ti"].xcom_pull(task_ids="plan", key=run_key())
    frozen = run.get("alerts") if isinstance(run, dict) else None
    return alerts_from(alerts_as_written(profile) if frozen is None else frozen, profile)


class Alarm:
    """An ``on_failure_callback``: the task has failed for good.

    :param event: what that means.
    :param only: the errors that mean it; others are told by Airflow's own ways.
    """

    def __init__(self, event: Event, only: type[BaseException] = BaseException) -> None:
        self.event, self.only = event, only

    def __call__(self, context: Context) -> None:
        error = context.get("exception")
        if error is None or isinstance(error, self.only):
            ti = context["ti"]
            tell(context, self.event, f"{ti.dag_id} {ti.run_id}, {ti.task_id}: {error or 'marked failed'}")


class ProductionAlarm:
    """Of the tasks that give a host back: production may be down, and a person has to know, at once.

    As ``on_failure_callback`` it is told when no try is left; as ``on_retry_callback`` at the first failed try, where
    it is the host that says that production did not come back (an outage of SSH may pass with the next try).

    :param first_try: for ``on_retry_callback``.
    """

    def __init__(self, *, first_try: bool = False) -> None:
        self.first_try = first_try

    def __call__(self, context: Context) -> None:
        error, task, ti = context.get("exception"), context["task"], context["ti"]
        if self.first_try and (tries_before(context) or not _not_back(error)):
            return
        key = run_key(getattr(task, "on", ""))
        host = ti.xcom_pull(task_ids=getattr(task, "plan_task_id", "plan"), key=key)
        if not isinstance(host, dict) or "problem" in host:
            return  # the plan never told of this host, or left it out: nobody has borrowed it
        hope = "is tried again" if self.first_try else "has no try left"
        command = posixpath.join(host["home"], "hsx_host")
        text = (
            f"PRODUCTION MAY BE DOWN on host {host['ssh_conn_id']}: {ti.dag_id}, run {ti.run_id}, task {ti.task_id} "
            f"has not brought it back and {hope}: {error or 'marked failed'}\n"
            "The guards on the host go on trying once the lease has lapsed. By hand, on the host: "
            f"{command} restore --now (docs/operations.md)"
        )
        log.critical("%s", text)
        tell(context, "production_not_restored", text)


def _not_back(error: object) -> bool:
    """Whether it is the host that says so, and not because another run has it now."""
    return isinstance(error, HostTryAgain) and not isinstance(error, HostHeld)


class RunQueuedAt(BaseDeadlineReference):
    """When a run was first queued.

    In place of Airflow's own ``DAGRUN_QUEUED_AT``, with which Airflow 3.3 can't clear a task of the run (it answers
    500). The plugin registers it; Airflow's server and scheduler evaluate it, when a run is made.
    """

    required_kwargs: ClassVar[set[str]] = {"dag_id", "run_id"}

    def _evaluate_with(self, *, session: Any, dag_id: str, run_id: str) -> datetime | None:
        from airflow.models import DagRun  # theirs alone: a task has no database

        runs: list[Any] = DagRun.find(dag_id=dag_id, run_id=run_id, session=session)
        return runs[0].queued_at if runs else None


def deadline(profile: str, alerts: Alerts) -> DeadlineAlert | None:
    """The deadline of a profile's own DAG; None where none is configured."""
    if not (alerts.notifier and alerts.deadline_hours and "deadline" in alerts.on):
        return None
    return DeadlineAlert(
        reference=RunQueuedAt(),
        interval=timedelta(hours=alerts.deadline_hours),
        callback=AsyncCallback(deadline_missed, kwargs={"profile": profile}),
        name=f"not ended {alerts.deadline_hours:g} hours after it was queued",
    )


async def deadline_missed(profile: str, context: Any = None, **_: Any) -> None:
    """Called by the triggerer, with a context of the run's names alone."""
    alerts = alerts_from(alerts_as_written(profile), profile)
    run = (context or {}).get("dag_run") or {}
    run_id = run.get("run_id") or run.get("dag_run_id") or "a run" if isinstance(run, dict) else run.run_id
    text = f"{run_id} of profile {profile} has not ended {alerts.deadline_hours:g} hours after it was queued"
    # in a thread: a notifier may know the synchronous way only
    await asyncio.to_thread(_send, alerts, {**(context or {}), "alert": "deadline", "alert_text": text})


def _send(alerts: Alerts, context: Any) -> None:
    _made(alerts)(context)


def _made(alerts: Alerts) -> BaseNotifier:
    module, _, name = alerts.notifier.rpartition(".")
    made: BaseNotifier = getattr(importlib.import_module(module), name)(**alerts.args)
    return made


def check(alerts: Alerts) -> None:
    """ConfigError where the notifier can't be made: better in plan than when production is down. Nothing is sent."""
    if not alerts.notifier:
        return
    try:
        made: object = _made(alerts)
    except (ImportError, AttributeError) as e:
        raise ConfigError(
            f"can't be imported by Airflow's workers: {e}",
            field="alerts.notifier",
            value=alerts.notifier,
            fix="give the import path of a notifier, and install its provider",
        ) from e
    except Exception as e:
        raise ConfigError(
            f"{alerts.notifier} can't be made with these arguments: {e}",
            field="alerts.args",
            value=", ".join(alerts.args) or "none",  # a value may be secret
            fix="give the arguments of that notifier",
        ) from e
    if not callable(made):
        raise ConfigError(
            "is no notifier: it can't be called with a run's context",
            field="alerts.notifier",
            value=alerts.notifier,
            fix="give the import path of a BaseNotifier",
        )
