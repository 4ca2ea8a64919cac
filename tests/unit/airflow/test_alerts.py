"""Who is told of what: off until configured, and nothing that goes wrong with an alert fails a task."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_args

import pytest
import yaml
from airflow.sdk import BaseNotifier
from fleet_profile import REPO, body, dag_bag, write

from hsx_host import contract as c
from hsx_operators import alerts
from hsx_operators.errors import ConfigError, HostHeld, HostRefused, HostTryAgain, HostUnreachable, ProfileError
from hsx_operators.plan import PlanOperator
from hsx_operators.profile import load_profile, parse_hosts
from hsx_operators.shapes import alerts_as_written, shape
from hsx_operators.unattended import Alerts, Event

REFUSED = HostRefused("disk", c.ErrorDoc("refused", "short by 3 GiB"))
DOWN = HostTryAgain("restore", c.ErrorDoc("again", "the production server ended before it was ready"))


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


class Store(dict[str, Any]):
    """The task state store."""

    set = dict.__setitem__


ON = {"notifier": "test_alerts.Notifier"}


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    import test_alerts  # the notifier as its import path finds it

    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    test_alerts.Notifier.told.clear()
    yield test_alerts.Notifier.told
    test_alerts.Notifier.told.clear()


def context(exception: BaseException | None = None) -> Any:
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="probe", xcom_pull=lambda **_: None)
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


def given_back(error: BaseException | None, try_number: int = 7, **host: Any) -> Any:
    """The context of a restore's callback; ``max_tries`` as after one clear of a task with 6 retries."""
    told = {"ssh_conn_id": "gpu-1", "home": "/srv/hsx", **host}
    ti = SimpleNamespace(
        dag_id="d", run_id="r", task_id="restore", try_number=try_number, max_tries=13, xcom_pull=lambda **_: told
    )
    return {"params": {"profile": "p"}, "ti": ti, "task": SimpleNamespace(on="", retries=6), "exception": error}


def test_production_that_is_not_back_is_told_with_what_to_do(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    write(tmp_path, "p", body(alerts=ON))
    alerts.ProductionAlarm()(given_back(DOWN, try_number=14))
    ((event, text),) = told
    assert event == "production_not_restored"
    for word in ("PRODUCTION MAY BE DOWN on host gpu-1", "run r", "ended before it was ready", "no try left"):
        assert word in text
    assert "/srv/hsx/hsx_host restore --now" in text


@pytest.mark.parametrize(
    ("error", "try_number", "heard"),
    [
        (DOWN, 8, True),  # the first of seven after a clear: three starts have failed, that is minutes to hours
        (DOWN, 9, False),
        (HostHeld("restore", c.ErrorDoc("again", "held by run x", "lease")), 8, False),  # its run gives it back
        (HostUnreachable("no SSH"), 8, False),  # may pass with the next try
    ],
)
def test_somebody_is_woken_at_the_first_failure_already(
    tmp_path: Path, told: list[tuple[str, str]], error: BaseException, try_number: int, heard: bool
) -> None:
    write(tmp_path, "p", body(alerts=ON))
    alerts.ProductionAlarm(first_try=True)(given_back(error, try_number))
    assert len(told) == heard
    assert not told or "is tried again" in told[0][1]


@pytest.mark.parametrize("now", ["host: [", "gone", "changed", "elsewhere"])
def test_a_profile_that_is_edited_while_production_is_down_keeps_no_alert_back(
    tmp_path: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch, now: str
) -> None:
    """The plan froze whom to tell, with its variables unreplaced: they may hold secrets, and an XCom shows them."""
    monkeypatch.setenv("ALERT_NAME", "night shift")
    write(tmp_path, "p", body(alerts={**ON, "args": {"subject": "${ALERT_NAME}"}, "on": ["production_not_restored"]}))
    frozen = json.loads(json.dumps(alerts_as_written("p")))
    assert frozen["args"] == {"subject": "${ALERT_NAME}"}
    if now == "gone":
        (tmp_path / "p.yaml").unlink()
    else:
        write(tmp_path, "p", now if now == "host: [" else body(shard=7) if now == "elsewhere" else body(alerts={}))
    alerts.ProductionAlarm()(given_back(DOWN, alerts=frozen))
    assert [subject for subject, _ in told] == ["night shift"]


def test_before_there_is_a_plan_mistakes_elsewhere_in_the_file_keep_no_alert_back(
    tmp_path: Path, told: list[tuple[str, str]]
) -> None:
    written = yaml.safe_dump(body(alerts=ON, shard=7)).replace("alerts:\n", "alerts:\n  on: [disk_short]\n")
    write(tmp_path, "p", written)  # an unquoted on, as a person writes it
    alerts.tell(context(), "disk_short", "x")
    alerts.tell(context(), "probe_failed", "x")
    assert [event for event, _ in told] == ["disk_short"]


def test_a_host_that_was_never_borrowed_wakes_nobody(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    write(tmp_path, "p", body(alerts=ON))
    alerts.ProductionAlarm()(given_back(DOWN, problem="no SSH"))
    nothing = given_back(DOWN)
    nothing["ti"].xcom_pull = lambda **_: None
    alerts.ProductionAlarm()(nothing)
    assert told == []


def test_without_a_notifier_the_task_s_log_says_it(
    tmp_path: Path, told: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr("hsx_operators.alerts.log.critical", lambda text, *args: said.append(text % args))
    write(tmp_path, "p", body())
    alerts.ProductionAlarm()(given_back(DOWN))
    assert told == []
    assert "PRODUCTION MAY BE DOWN" in said[0]


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
        ({"host_command": ["wake", "oncall"]}, "alerts.host_command = ['wake', 'oncall']"),
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
            if isinstance(callback, alerts.ProductionAlarm):
                assert not callback.first_try
                found.setdefault("production", set()).add(task.task_id.rpartition(".")[2])
        for callback in task.on_retry_callback or []:
            assert isinstance(callback, alerts.ProductionAlarm)
            assert callback.first_try
            found.setdefault("production, first try", set()).add(task.task_id.rpartition(".")[2])
    assert found == {
        "production": {"restore", "production_healthy"},
        "production, first try": {"restore"},
        "probe_failed": {"probe"},
        "disk_short": {"disk_check"},
    }


DOCUMENTED = "\n    alerts:\n"


def test_the_documented_block_is_a_profile_s(tmp_path: Path, told: list[Any]) -> None:
    """As text: YAML 1.1 reads the key ``on`` as true."""
    lines = (REPO / "docs" / "operations.md").read_text().split(DOCUMENTED)[1].splitlines()
    block = "\n".join(line[4:] for line in itertools.takewhile(lambda line: line.startswith("      "), lines))
    write(tmp_path, "p", f"{yaml.safe_dump(body())}\nalerts:\n{block}\n")
    found = load_profile("p").alerts
    assert found == shape("p").alerts
    assert (found.on, found.deadline_hours) == (list(get_args(Event)), 5)
    assert not shape("p").problem
    alerts.check(found)  # and its notifier is there


def test_only_some_events_written_as_a_person_does(tmp_path: Path, told: list[tuple[str, str]]) -> None:
    write(tmp_path, "p", f"{yaml.safe_dump(body())}\nalerts:\n  notifier: a.B\n  on: [deadline]\n")
    assert load_profile("p").alerts.on == ["deadline"]
    with pytest.raises(ProfileError, match="alerts"):
        parse_hosts(body(alerts={"on": [], True: []}), "both")


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"notifier": "no.such.module.Notifier"}, "alerts.notifier"),
        ({"notifier": "test_alerts.Notifyer"}, "alerts.notifier"),
        ({"notifier": "test_alerts.ON"}, "alerts.args"),
        ({"notifier": "types.SimpleNamespace"}, "alerts.notifier"),
        ({**ON, "args": {"subjekt": "s3cret"}}, "alerts.args"),
    ],
)
def test_a_notifier_that_cannot_be_made_is_refused_by_plan(
    tmp_path: Path, told: list[Any], settings: dict[str, Any], named: str
) -> None:
    write(tmp_path, "p", body(alerts=settings))
    context: Any = {
        "params": {"profile": "p"}, "dag_run": SimpleNamespace(conf={}), "ti": SimpleNamespace(try_number=1),
        "task_state_store": Store(),
    }  # fmt: skip
    with pytest.raises(ConfigError) as e:
        PlanOperator(task_id="plan", hosts=["gpu1", "gpu2"]).execute(context)
    assert e.value.field == named
    assert e.value.fix
    assert "s3cret" not in str(e.value)


def test_a_good_notifier_is_made_and_sends_nothing(told: list[Any]) -> None:
    alerts.check(Alerts())
    alerts.check(Alerts(**ON, args={"subject": "x"}))
    assert told == []
