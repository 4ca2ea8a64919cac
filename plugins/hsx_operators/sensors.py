"""Waits for a healthy server without holding a worker; used after the start and after the restore."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseSensorOperator
from airflow.sdk.exceptions import AirflowSensorTimeout
from airflow.triggers.base import TriggerEvent

from hsx_host import contract as c
from hsx_operators.base import POOL, run_of
from hsx_operators.errors import HostError, named_error
from hsx_operators.hook import hook_of
from hsx_operators.retry import HOST_RETRIES
from hsx_operators.triggers import HostTrigger

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class ServerHealthTrigger(HostTrigger):
    """Asks the host for its server until that serves in the wanted mode.

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
        try:
            while True:
                facts = await self.patient(c.HostStatus, STATUS)
                if healthy(facts, self.mode):
                    yield TriggerEvent({"end": "healthy", "facts": c.to_dict(facts)})
                    return
                if self.deadline and time.time() > self.deadline:
                    yield TriggerEvent({"end": "timeout", "facts": c.to_dict(facts)})
                    return
                await asyncio.sleep(self.poke_interval)
        except HostError as e:
            yield TriggerEvent({"end": "error", "error": type(e).__name__, "message": str(e)})
