"""What a profile says about runs that nobody watches: the nights, and whom to tell of trouble."""

from __future__ import annotations

import re
from datetime import datetime
from typing import Annotated, Any, Literal, get_args
from zoneinfo import ZoneInfo

from croniter import CroniterBadDateError, croniter
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

#: A time of day, "05:00".
CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]"
Event = Literal["production_not_restored", "probe_failed", "disk_short", "window_ended", "deadline"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Nightly(_Model):
    """When the profile runs by itself: a cron line and its time zone (IANA), and when extraction ends ("05:00").

    ``stop_after`` bounds scheduled runs and backfills; a run that a person triggers has no window unless its Param
    says so.
    """

    schedule: str = ""
    timezone: str = "UTC"
    stop_after: str = ""

    @field_validator("schedule")
    @classmethod
    def _cron(cls, line: str) -> str:
        if line and not croniter.is_valid(line):
            raise ValueError("is not a cron line (such as 0 1 * * *)")
        try:
            if line:
                croniter(line, datetime.now()).get_next()
        except CroniterBadDateError:
            raise ValueError("never comes: no such day, or a year that is over (such as 0 1 * * *)") from None
        return line

    @field_validator("timezone")
    @classmethod
    def _zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (KeyError, ValueError, OSError):
            raise ValueError("is not a time zone (such as Europe/Berlin)") from None
        return zone

    @field_validator("stop_after")
    @classmethod
    def _clock(cls, time: str) -> str:
        if time and not re.fullmatch(CLOCK, time):
            raise ValueError('is not a time of day (such as "05:00", quoted)')
        return time


class Alerts(_Model):
    """Whom to tell. Off until ``notifier`` names one of Airflow's notifiers, ``host_command`` a program of the host.

    :param notifier: import path of a ``BaseNotifier``, such as
        ``airflow.providers.smtp.notifications.smtp.SmtpNotifier``.
    :param args: its arguments; Jinja, with ``{{ alert }}`` (the event) and ``{{ alert_text }}`` beside Airflow's own.
    :param on: the events that it is told of; all of them by default.
    :param deadline_hours: a run that has not ended so long after it was queued is told too (``deadline``).
    :param host_command: a program on the host, by its absolute path, and its arguments: the guards call it, with the
        text as one argument more, where they could not bring production back; no Airflow is needed for that.
    """

    notifier: str = Field(default="", pattern=r"^$|^[A-Za-z_][\w.]*\.[A-Za-z_]\w*$")
    args: dict[str, Any] = {}
    on: list[Event] = list(get_args(Event))
    deadline_hours: Annotated[float, Field(gt=0, le=8760)] | None = None
    host_command: list[str] = []

    @model_validator(mode="before")
    @classmethod
    def _on_is_a_word(cls, body: Any) -> Any:
        """YAML 1.1 reads an unquoted ``on`` as true, as a key too."""
        if isinstance(body, dict) and True in body and "on" not in body:
            return {"on" if key is True else key: value for key, value in body.items()}
        return body

    @field_validator("host_command")
    @classmethod
    def _program(cls, words: list[str]) -> list[str]:
        if words and not words[0].startswith("/"):
            raise ValueError("does not begin with the absolute path of a program on the host")
        return words
