"""Waits for a healthy server without holding a worker; used after the start and after the restore."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowSensorTimeout
from airflow.triggers.base import TriggerEvent

from hsx_host import contract as c
from hsx_operators.alerts import ProductionAlarm
from hsx_operators.base import run_of
from hsx_operators.errors import HostError, named_error
from hsx_operators.hook import hook_of
from hsx_operators.hosts import POOL
from hsx_operators.published import Told, reasons_kept, tell
from hsx_operators.retry import HOST_RETRIES
from hsx_operators.triggers import SETTLE_S, HostTrigger

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

#: Asks the server for one real token, and renews the lease of the run.
STATUS = ["status", "--health", "--renew", "--lines", "1"]


def healthy(status: c.StatusResult, mode: str) -> bool:
    """Whether the host serves in ``mode``, with a real token as the proof."""
    return status.healthy and status.mode == mode


class ServerHealthTrigger(HostTrigger):
    """Asks the host until its server serves in the wanted mode.

    :param host: see HostTrigger.
    :param mode: ``production`` or ``extraction``.
    :param poke_interval: seconds between two questions.
    """

    def __init__(
        self, host: dict[str, Any], mode: str, poke_interval: float, outage_s: float = 900.0, deadline: float = 0.0
    ) -> None:
        super().__init__(host, outage_s, deadline)
        self.mode, self.poke_interval = mode, poke_interval

    def serialize(self) -> tuple[str, dict[str, Any]]:
        """For the triggerer."""
        kwargs = {
            "host": self.host,
            "mode": self.mode,
            "poke_interval": self.poke_interval,
            "outage_s": self.outage_s,
            "deadline": self.deadline,
        }
        return f"{type(self).__module__}.{type(self).__qualname__}", kwargs

    async def run(self) -> AsyncIterator[TriggerEvent]:
        """Ask until healthy, or until the deadline."""
        told = Told(self.host["ssh_conn_id"], ["health"])
        try:
            await asyncio.sleep(SETTLE_S)
            while True:
                status = await self.patient(c.StatusResult, STATUS)
                told.say(mode=status.mode, phase=status.phase, text=status.problem)
                await self.tell(told)
                end = "healthy" if healthy(status, self.mode) else "timeout" if time.time() > self.deadline else ""
                if end:
                    yield TriggerEvent({"end": end, "status": c.to_dict(status)})
                    return
                self.log.info("not yet: mode %s %s %s", status.mode, status.phase, status.problem)
                await asyncio.sleep(self.poke_interval)
        except HostError as e:
            yield TriggerEvent({"end": "error", "error": type(e).__name__, "message": str(e)})


class ServerHealthSensor(BaseSensorOperator):
    """Done when the host serves in ``mode`` and has generated a real token. Deferrable; asks once before it defers.

    :param mode_wanted: ``production`` or ``extraction``.
    :param plan_task_id: the task whose XCom ``run`` says where the host is.
    :param on: the host's name in a profile that lists several.
    :param poke_interval: seconds between two questions.
    :param timeout: seconds until it gives up; the server's start itself was waited for by the step before.
    """

    ui_color = "#d9efe0"

    def __init__(
        self,
        *,
        mode_wanted: Literal["production", "extraction"],
        plan_task_id: str = "plan",
        on: str = "",
        poke_interval: timedelta | float = 10.0,
        timeout: timedelta | float = 900.0,
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("retries", 4)
        kwargs.setdefault("retry_delay", timedelta(seconds=30))
        kwargs.setdefault("retry_policy", HOST_RETRIES)
        kwargs.setdefault("pool", POOL)
        if mode_wanted == "production":
            kwargs.setdefault("on_failure_callback", ProductionAlarm())
        super().__init__(poke_interval=poke_interval, timeout=timeout, **kwargs)
        self.mode_wanted, self.plan_task_id, self.on = mode_wanted, plan_task_id, on

    def execute(self, context: Context) -> Any:
        """Ask once; wait in a trigger where the answer is no."""
        with reasons_kept(context):
            host = run_of(context, self.plan_task_id, self.on)
            told = Told(host["ssh_conn_id"], ["health"])
            tell(context, told)
            with hook_of(host) as hook:
                status = hook.run_verb(c.StatusResult, STATUS, spec_path=host["spec_path"])
            told.say(mode=status.mode, phase=status.phase, text=status.problem)
            tell(context, told)
        if healthy(status, self.mode_wanted):
            return self._tell(c.to_dict(status))
        self.log.info("not yet: mode %s %s %s", status.mode, status.phase, status.problem)
        return self.defer(
            trigger=ServerHealthTrigger(
                host=host, mode=self.mode_wanted, poke_interval=self.poke_interval, deadline=time.time() + self.timeout
            ),
            method_name="execute_complete",
        )

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Any:
        """Healthy, or the reason why not."""
        with reasons_kept(context):
            if event["end"] == "error":
                raise named_error(event["error"], event["message"])
            status = event["status"]
            if event["end"] == "timeout":
                raise AirflowSensorTimeout(
                    f"no healthy {self.mode_wanted} server after {self.timeout:.0f} s: its mode is {status['mode']}; "
                    f"{status['problem'] or 'it answers'} (read the server's log below home/logs on the host)"
                )
        return self._tell(status)

    def _tell(self, status: dict[str, Any]) -> dict[str, Any]:
        self.log.info("%s serves (pid %d) and has generated a token", status["mode"], status["pid"])
        return {"mode": status["mode"], "pid": status["pid"], "healthy": True}
