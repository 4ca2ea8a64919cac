"""Who is told of what: off until configured, and nothing that goes wrong with an alert fails a task."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from airflow.sdk import BaseNotifier
from fleet_profile import body, dag_bag, write

from hsx_host import contract as c
from hsx_operators import alerts
from hsx_operators.errors import HostRefused, HostUnreachable, ProfileError
from hsx_operators.profile import parse_hosts
from hsx_operators.shapes import shape
from hsx_operators.unattended import Alerts

REFUSED = HostRefused("disk", c.ErrorDoc("refused", "short by 3 GiB"))


class Notifier(BaseNotifier):
    """Keeps what it was told."""

    template_fields = ("subject", "text")
    told: ClassVar[list[tuple[str, str]]] = []

    def __init__(self, subject: str = "{{ alert }}", text: str = "{{ alert_text }}") -> None:
        super().__init__()
        self.subject, self.text = subject, text

    def notify(self, context: Any) -> None:
        if self.text == "boom":
            raise OSError("no mail server")
        self.told.append((self.subject, self.text))


ON = {"notifier": "test_alerts.Notifier"}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    import test_alerts  # the notifier as its import path finds it

    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    test_alerts.Notifier.told.clear()
    yield test_alerts.Notifier.told
    test_alerts.Notifier.told.clear()


def context(exception: BaseException | None = None) -> Any:
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="probe")
    return {"params": {"profile": "p"}, "ti": ti, "exception": exception}


def test_off_until_configured(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    write(tmp_path, "p", body())
    alerts.tell(context(), "probe_failed", "x")
    assert told == []


def test_told_of_what_it_wants_to_hear(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    write(tmp_path, "p", body(alerts={**ON, "args": {"subject": "hsx: {{ alert }}"}, "on": ["disk_short"]}))
    alerts.Alarm("disk_short", only=HostRefused)(context(REFUSED))
    alerts.Alarm("disk_short", only=HostRefused)(context(HostUnreachable("no answer")))
    alerts.Alarm("probe_failed")(context(REFUSED))
    assert told == [("hsx: disk_short", "d r, probe: disk: short by 3 GiB")]


def test_an_alert_that_cannot_be_sent_fails_nothing(
    tmp_path: Path, told: list[tuple[str, str]], caplog: pytest.LogCaptureFixture
) -> None:
    for broken in ({"notifier": "no.such.Thing"}, {**ON, "args": {"nonsense": 1}}, {**ON, "args": {"text": "boom"}}):
        write(tmp_path, "p", body(alerts=broken))
        alerts.tell(context(), "probe_failed", "the probe failed")
    write(tmp_path, "p", "host: [")
    alerts.tell(context(), "probe_failed", "the probe failed")
    assert told == []


def test_deadline(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    assert alerts.deadline("p", Alerts()) is None
    assert alerts.deadline("p", Alerts(deadline_hours=4)) is None
    assert alerts.deadline("p", Alerts(**ON, deadline_hours=4, on=["probe_failed"])) is None
    write(tmp_path, "p", body(nightly={"schedule": "0 1 * * *"}, alerts={**ON, "deadline_hours": 4.5}))
    dag = dag_bag().dags["hsx_extraction__p"]
    assert dag.deadline is not None
    (alert,) = dag.deadline if isinstance(dag.deadline, list) else [dag.deadline]
    assert alert.interval.total_seconds() == 4.5 * 3600
    assert alert.callback.path == "hsx_operators.alerts.deadline_missed"
    asyncio.run(alerts.deadline_missed(**alert.callback.kwargs, context={"dag_run": {"dag_run_id": "night"}}))
    assert told == [("deadline", "night of profile p has not ended 4.5 hours after it was queued")]


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"notifier": "smtp"}, "alerts.notifier = 'smtp'"),
        ({**ON, "on": ["everything"]}, "alerts.on[0] = 'everything'"),
        ({**ON, "deadline_hours": 0}, "alerts.deadline_hours = 0"),
        ({"notifyer": "a.B"}, "alerts.notifyer = 'a.B': is not a setting (did you mean notifier?)"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, told: list[Any], settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ProfileError) as e:
        parse_hosts(body(alerts=settings), "profile test")
    assert e.value.problems[0].startswith(named), e.value.problems
    write(tmp_path, "p", body(alerts=settings))
    assert named.split(":")[0] in shape("p").problem


def test_each_alarm_hangs_on_its_tasks(tmp_path: Path, told: list[Any]) -> None:
    write(tmp_path, "p", body())
    found: dict[str, set[str]] = {}
    for task in dag_bag().dags["hsx_extraction__p"].tasks:
        for callback in task.on_failure_callback or []:
            if isinstance(callback, alerts.Alarm):
                found.setdefault(callback.event, set()).add(task.task_id.rpartition(".")[2])
    assert found == {
        "production_not_restored": {"restore", "production_healthy"},
        "probe_failed": {"probe"},
        "disk_short": {"disk_check"},
    }
