"""Until when a run may extract, and what the steps do that come too late."""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from types import SimpleNamespace
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from airflow.sdk import DAG, BaseOperator, RetryAction
from airflow.sdk.api.datamodels._generated import DagRunType
from airflow.sdk.exceptions import DownstreamTasksSkipped

from hsx_host import contract as c
from hsx_operators import base, window
from hsx_operators.base import HostVerbOperator
from hsx_operators.errors import ConfigError, HostBug, HostHeld, HostTryAgain, HostUnreachable, RemoteJobDied
from hsx_operators.extraction import ExtractShardOperator, TrainingHandoffOperator, VerifyDatasetOperator
from hsx_operators.plan import SKIPPED_BECAUSE
from hsx_operators.servers import AcquireHostOperator, BenchmarkOperator
from hsx_operators.topup import TopUpOperator
from hsx_operators.unattended import Nightly

BERLIN = ZoneInfo("Europe/Berlin")
NIGHTLY = Nightly(schedule="0 1 * * *", timezone="Europe/Berlin", stop_after="05:00")


def end(now: datetime, param: str = "", run_type: str = "scheduled", nightly: Nightly = NIGHTLY) -> datetime | None:
    at = window.window_end(nightly, param, run_type, now.timestamp())
    return datetime.fromtimestamp(at, BERLIN) if at else None


def test_the_next_time_that_the_clock_shows_it() -> None:
    assert end(datetime(2026, 7, 1, 1, 0, tzinfo=BERLIN)) == datetime(2026, 7, 1, 5, 0, tzinfo=BERLIN)
    assert end(datetime(2026, 7, 1, 22, 0, tzinfo=BERLIN)) == datetime(2026, 7, 2, 5, 0, tzinfo=BERLIN)
    assert end(datetime(2026, 7, 1, 5, 0, tzinfo=BERLIN)) == datetime(2026, 7, 2, 5, 0, tzinfo=BERLIN)
    # the night in which the clock is set back has an hour more
    spring, autumn = (datetime(2026, m, d, 1, 0, tzinfo=BERLIN) for m, d in ((3, 29), (10, 25)))
    for night, hours in ((spring, 3), (autumn, 5)):
        found = end(night)
        assert found is not None
        assert found.timestamp() - night.timestamp() == hours * 3600


def test_the_hour_that_comes_twice_has_its_end_twice() -> None:
    first, again = (datetime(2026, 10, 25, 2, 10, tzinfo=BERLIN, fold=fold) for fold in (0, 1))
    nightly = Nightly(timezone="Europe/Berlin", stop_after="02:30")
    for now in (first, again):
        assert window.window_end(nightly, "", "scheduled", now.timestamp()) - now.timestamp() == 20 * 60


@pytest.mark.parametrize(
    ("param", "run_type", "hour"),
    [
        ("", "scheduled", 5),
        ("", "backfill", 5),
        ("", "manual", None),
        ("07:30", "manual", 7),
        ("07:30", "scheduled", 7),
    ],
)
def test_whose_window_it_is(param: str, run_type: str, hour: int | None) -> None:
    found = end(datetime(2026, 7, 1, 1, 0, tzinfo=BERLIN), param, run_type)
    assert (found.hour if found else None) == hour


@pytest.mark.parametrize(
    ("kind", "hours"), [(DagRunType.SCHEDULED, -7), (DagRunType.BACKFILL, 17), (DagRunType.MANUAL, None)]
)
def test_a_night_that_begins_late_ends_at_its_own_end(
    monkeypatch: pytest.MonkeyPatch, kind: DagRunType, hours: int | None
) -> None:
    noon = datetime(2026, 7, 1, 12, 0, tzinfo=BERLIN)
    monkeypatch.setattr(window.time, "time", noon.timestamp)
    run = SimpleNamespace(run_type=kind, run_after=datetime(2026, 7, 1, 1, 0, tzinfo=BERLIN))
    found = window.end_for(NIGHTLY, "", run)
    assert (round((found - noon.timestamp()) / 3600) if found else None) == hours


def test_no_window_and_a_bad_one() -> None:
    assert window.window_end(Nightly(), "", "scheduled", 0.0) == 0.0
    with pytest.raises(ConfigError, match="stop_after = '5 am'"):
        window.window_end(Nightly(), "5 am", "manual", 0.0)


class Ti:
    """A running task instance, as far as these steps ask."""

    dag_id, run_id, task_id, map_index, try_number = "d", "r", "t", -1, 1

    def __init__(self, stop_after: float, pace: dict[str, float] | None = None) -> None:
        run = {"stop_after": stop_after, "benchmark": True, "spec_path": "/s", "python": "/p"}
        self.known: dict[str, Any] = {"run": run, "plan": {"pace": pace}}
        self.pushed: dict[str, Any] = {}

    def xcom_pull(self, task_ids: str, key: str) -> Any:
        return self.known.get(key)

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


def context(ti: Ti, task: Any = None, cleared: int = 0) -> Any:
    return {"ti": ti, "task": task, "dag_run": SimpleNamespace(clear_number=cleared)}


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    names: list[str] = []
    take = lambda self, ti, tasks: names.extend(t.task_id for t in tasks)  # noqa: E731
    for cls in (AcquireHostOperator, BenchmarkOperator):
        monkeypatch.setattr(cls, "skip", take)
        monkeypatch.setattr(cls, "run_verb", lambda self, context: "ran")
    return names


def line(first: Any) -> Any:
    with DAG("d"):
        step = first()
        after, last = BaseOperator(task_id="after"), BaseOperator(task_id="end").as_teardown(setups=step)
        step >> after >> last
    return step


STEPS = [lambda: AcquireHostOperator(task_id="acquire"), lambda: BenchmarkOperator(task_id="before", phase="before")]


@pytest.mark.parametrize("step", STEPS)
def test_a_step_that_comes_too_late_skips_the_rest_and_leaves_production_alone(step: Any, skipped: list[str]) -> None:
    ti = Ti(time.time() - 1)
    task = line(step)
    assert task.execute(context(ti, task)) is None
    assert skipped == ["after"]
    assert "production was not touched" in ti.pushed[SKIPPED_BECAUSE]


@pytest.mark.parametrize("step", STEPS)
def test_a_host_is_not_borrowed_for_less_than_borrowing_it_takes(step: Any, skipped: list[str]) -> None:
    task = line(step)
    assert task.execute(context(Ti(time.time() + 60, pace={"overhead_s": 600.0}), task)) is None
    assert skipped == ["after"]


@pytest.mark.parametrize("step", STEPS)
def test_in_the_window_and_after_a_clear_the_step_runs(step: Any, skipped: list[str]) -> None:
    task = line(step)
    assert task.execute(context(Ti(time.time() + 600), task)) == "ran"
    assert task.execute(context(Ti(0.0), task)) == "ran"
    # a person who clears a task of last night's run in the morning wants it done
    assert task.execute(context(Ti(time.time() - 1), task, cleared=1)) == "ran"
    assert skipped == []


class Store(dict[str, Any]):
    """The task state store."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


HOLD_OFF: list[Callable[[], Any]] = [
    lambda: AcquireHostOperator(task_id="acquire"),
    lambda: BenchmarkOperator(task_id="before", phase="before"),
    lambda: BenchmarkOperator(task_id="after", phase="after"),
    lambda: TopUpOperator(task_id="top_up"),
]
HELD = HostHeld("v", c.ErrorDoc("again", "held", "lease", "run-7"))


def tries_of(make: Callable[[], Any], fails: Callable[[int], BaseException], **run: Any) -> int:
    """How often the step is tried until it fails for good, by what its verb's calls end with."""
    task, store = make(), Store()
    for number in itertools.count(1):
        ti: Any = Ti(0.0)
        ti.try_number, ti.max_tries = number, task.retries
        ti.known["run"] |= {"ssh_conn_id": "h", "top_up": True, "dry_run": False, **run}
        now: Any = {**context(ti, task), "task_state_store": store}
        error = fails(number)
        vars(error).pop("hsx_kept", None)  # as if it were made anew

        def ends(*_: Any, error: BaseException = error) -> Any:
            raise error

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "hook_of", lambda host: contextlib.nullcontext())
            patch.setattr(HostVerbOperator, "_run", ends)
            with pytest.raises(type(error)):
                task.execute(now)
        decision = task.retry_policy.evaluate(error, number, task.retries, now)
        if number > task.retries or decision.action is RetryAction.FAIL:
            return number
    raise AssertionError


@pytest.mark.parametrize("step", HOLD_OFF)
def test_a_held_host_is_waited_for_a_day_and_nothing_else_so_long(step: Callable[[], Any]) -> None:
    assert tries_of(step, lambda _: HELD) == 289
    doc = c.ErrorDoc("again", "no space left", "host.home")
    for error in (HostTryAgain("v", doc), HostBug("v", doc), RemoteJobDied("m"), HostUnreachable("m"), KeyError("x")):
        assert tries_of(step, lambda _, error=error: error) == 5, error
    # trouble in between, after hours of waiting, has its few tries too
    trouble = HostUnreachable("m")
    assert tries_of(step, lambda n: trouble if n % 50 in (1, 2, 3) else HELD) == 289
    assert tries_of(step, lambda n: HELD if n < 100 else trouble) == 104
    late = "after" in step().task_id
    assert tries_of(step, lambda _: HELD, when_held="fail") == (289 if late else 1)


def test_a_top_up_that_waited_until_the_window_ended_skips_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []
    monkeypatch.setattr(TopUpOperator, "skip", lambda self, ti, tasks: names.extend(t.task_id for t in tasks))
    task, ti = line(lambda: TopUpOperator(task_id="top_up")), Ti(time.time() - 1)
    ti.known["run"] |= {"top_up": True, "dry_run": False}
    assert task.execute(context(ti, task)) is None
    assert names == ["after"]
    assert "production was not touched" in ti.pushed[SKIPPED_BECAUSE]


@pytest.mark.parametrize(("on", "told"), [("", 1), ("gpu1", 0)])
def test_the_end_of_a_window_is_told_once_of_all_hosts(
    monkeypatch: pytest.MonkeyPatch, skipped: list[str], on: str, told: int
) -> None:
    """Of several hosts the hand-off tells: it is not skipped with one host's group."""
    heard: list[str] = []
    monkeypatch.setattr("hsx_operators.alerts.tell", lambda context, event, text: heard.append(event))
    task, ti = line(lambda: AcquireHostOperator(task_id="acquire", on=on)), Ti(time.time() - 1)
    ti.known[f"run_{on}"] = ti.known["run"]
    task.execute(context(ti, task))
    assert heard == ["window_ended"] * told


def test_the_host_program_is_told() -> None:
    late, early = time.time() - 1, time.time() + 600
    extract: Any = ExtractShardOperator(task_id="extract", shard={"id": 3})
    verify: Any = VerifyDatasetOperator(task_id="verify", shards=[{"id": 3}, {"id": 7}])
    assert extract.verb(context(Ti(early))) == ["extract", "--shard", "3", "--stop-after", repr(early)]
    assert extract.verb(context(Ti(0.0))) == ["extract", "--shard", "3"]
    assert verify.verb(context(Ti(early))) == ["verify", "--captured", "--shard", "3", "--shard", "7"]
    assert verify.verb(context(Ti(late))) == ["verify", "--captured", "--window-ended", "--shard", "3", "--shard", "7"]
    # a shard that is cleared by day is done at any hour; what the window has left is no fault of it
    assert extract.verb(context(Ti(late), cleared=1)) == ["extract", "--shard", "3"]
    assert verify.verb(context(Ti(late), cleared=1)) == [
        "verify",
        "--captured",
        "--window-ended",
        "--shard",
        "3",
        "--shard",
        "7",
    ]
    handoff: Any = TrainingHandoffOperator(task_id="handoff")
    assert handoff.verb(context(Ti(late), cleared=1)) == ["handoff", "--window-ended"]
    assert handoff.verb(context(Ti(early), cleared=1)) == ["handoff"]


def test_the_first_shard_that_the_window_cuts_skips_those_that_nobody_has_begun() -> None:
    summary = c.ShardSummary(3, "shard 00003", 60, 20, 20, 0, 900, 90, 2.0, 450.0, "", [], left=40)
    others = {0: "success", 1: "failed", 2: "deferred", 3: "running", 4: "queued", 5: "scheduled", 6: None}

    class Mapped(Ti):
        dag_id, run_id = "d", "r"

        def get_task_states(self, dag_id: str, run_ids: list[str]) -> dict[str, dict[str, str | None]]:
            states = {f"a.extract_{i}": state for i, state in others.items()}
            return {"r": states | {"a.verify": None, "b.extract_0": None, "a.extract_more": None}}

    task: Any = ExtractShardOperator(task_id="a.extract", shard={"id": 3})
    ti = Mapped(time.time() - 1)
    host = {"profile": "p", "ssh_conn_id": "h"}
    with pytest.raises(DownstreamTasksSkipped) as skips:
        task.result(summary, host, context(ti))
    assert skips.value.tasks == [("a.extract", 4), ("a.extract", 5), ("a.extract", 6)]
    assert ti.pushed["return_value"]["left"] == 40  # its own answer is kept
    others = {0: "success", 3: "running"}
    assert task.result(summary, host, context(ti))["left"] == 40
    assert task.result(replace(summary, left=0), host, context(ti))["left"] == 0


def test_a_hand_off_that_the_window_kept_from_is_skipped_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    def refuses(field: str) -> Any:
        def run_verb(self: Any, context: Any) -> Any:
            raise HostTryAgain("handoff", c.ErrorDoc("again", "4 samples are left for the next run", field))

        return run_verb

    task: Any = TrainingHandoffOperator(task_id="handoff")
    ti = Ti(time.time() - 1)
    monkeypatch.setattr(TrainingHandoffOperator, "run_verb", refuses("--window-ended"))
    with pytest.raises(AirflowSkipException):
        task.execute(context(ti))
    assert ti.pushed[SKIPPED_BECAUSE] == "The window has ended: 4 samples are left for the next run."
    monkeypatch.setattr(TrainingHandoffOperator, "run_verb", refuses("lock"))
    with pytest.raises(HostTryAgain):
        task.execute(context(ti))
