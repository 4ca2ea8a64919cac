"""Detached verbs over a real SSH server: one copy whatever happens, watched by the trigger through outages."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hsx_demo.sshd import free_port, start_sshd
from hsx_host import contract as c
from hsx_operators import errors as e
from hsx_operators.answers import parse_answer
from hsx_operators.hook import GpuHostHook
from hsx_operators.sensors import ServerHealthTrigger
from hsx_operators.triggers import HostJobTrigger

#: A verb that waits up to a minute for the transition lock, which the test holds.
WAITS = ["patch", "revert"]


@contextmanager
def transition_held(home: Path) -> Iterator[None]:
    lock = home / "state" / "lock"
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("a") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        yield


def event_of(trigger: HostJobTrigger | ServerHealthTrigger, timeout_s: float = 60) -> dict[str, Any]:
    async def first() -> dict[str, Any]:
        try:
            async with asyncio.timeout(timeout_s):
                async for event in trigger.run():
                    payload: dict[str, Any] = event.payload
                    return payload
            raise AssertionError("no event")
        finally:
            await trigger.cleanup()

    return asyncio.run(first())


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(what: Callable[[], bool], timeout_s: float = 30) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.05)


def test_a_second_start_finds_the_first(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    spec_path = host["spec_path"]
    with transition_held(home):
        first = hook.job_start("job-1", WAITS, spec_path=spec_path)
        assert first.state == "running"
        assert hook.job_start("job-1", WAITS, spec_path=spec_path).pid == first.pid
        with GpuHostHook(hook.ssh_conn_id, hook.python, hook.home, hook.bundle) as another_worker:
            assert another_worker.job_poll("job-1", spec_path=spec_path).pid == first.pid
        killed = hook.job_kill("job-1", spec_path=spec_path)
    assert killed.state == "done"
    assert gone(first.pid)
    assert c.decode(c.ErrorDoc, killed.document).kind == "again"
    assert hook.job_poll("no-such-job", spec_path=spec_path).state == "absent"


def test_trigger_hands_over_the_document(hook: GpuHostHook, host: dict[str, Any]) -> None:
    hook.job_start("plan-1", ["plan"], spec_path=host["spec_path"])
    event = event_of(HostJobTrigger(host, "plan-1"))
    assert (event["end"], event["rc"]) == ("done", 0)
    assert c.decode(c.PlanResult, event["document"]).todo == 6


def test_trigger_streams_the_log_and_tells_a_refusal(
    hook: GpuHostHook, host: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    hook.job_start("refused", ["cleanup"], spec_path=host["spec_path"])
    event = event_of(HostJobTrigger(host, "refused"))
    assert (event["end"], event["rc"]) == ("done", 3)
    assert c.decode(c.ErrorDoc, event["document"]).kind == "refused"
    log = (Path(hook.home) / "jobs" / "refused" / "stderr").read_text()
    assert "Refused: " in log
    shown = capsys.readouterr().out
    assert all(line in shown for line in log.splitlines())
    # a restarted triggerer makes the trigger anew, as the task deferred it: what was shown isn't shown again
    assert event_of(HostJobTrigger(host, "refused", offset=0))["rc"] == 3
    assert log.splitlines()[0] not in capsys.readouterr().out


def test_trigger_waits_an_outage_out(
    hook: GpuHostHook, host: dict[str, Any], home: Path, tmp_path: Path, connection: Callable[..., None]
) -> None:
    folder = tmp_path / "door"
    door = start_sshd(folder)
    connection(host=door.host, port=door.port, host_key=door.host_key, key_file=door.key_file)

    async def scene() -> dict[str, Any]:
        nonlocal door
        trigger = HostJobTrigger(host, "outage")
        watch = asyncio.ensure_future(anext(trigger.run()))
        while trigger._conn is None:
            await asyncio.sleep(0.05)
        door.stop()
        while trigger._conn is not None:  # it has noticed
            await asyncio.sleep(0.05)
        assert not watch.done()
        door = await asyncio.to_thread(start_sshd, folder, port=door.port)
        hold.__exit__(None, None, None)
        async with asyncio.timeout(60):
            event = await watch
        await trigger.cleanup()
        payload: dict[str, Any] = event.payload
        return payload

    hold = transition_held(home)
    hold.__enter__()
    try:
        hook.job_start("outage", WAITS, spec_path=host["spec_path"])
        event = asyncio.run(scene())
    finally:
        door.stop()
    assert (event["end"], event["rc"]) == ("done", 0)


def test_trigger_gives_up_a_host_that_stays_away(
    host: dict[str, Any], sshd: Any, connection: Callable[..., None]
) -> None:
    connection(port=free_port())
    event = event_of(HostJobTrigger(host, "x", outage_s=0.0))
    assert (event["end"], event["error"]) == ("error", "HostUnreachable")


def test_trigger_does_not_wait_for_a_wrong_key(
    host: dict[str, Any], connection: Callable[..., None], tmp_path: Path
) -> None:
    other = start_sshd(tmp_path / "other")
    try:
        connection(host_key=other.host_key)
        assert event_of(HostJobTrigger(host, "x"))["error"] == "HostKeyMismatch"
        connection(key_file=other.key_file)
        assert event_of(HostJobTrigger(host, "x"))["error"] == "HostLoginRefused"
    finally:
        other.stop()


def test_trigger_sees_that_the_job_died(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    with transition_held(home):
        job = hook.job_start("dies", WAITS, spec_path=host["spec_path"])
        os.killpg(job.pid, signal.SIGKILL)
        event = event_of(HostJobTrigger(host, "dies"))
    assert event["end"] == "died"


def test_a_killed_host_program_is_told_from_a_verdict(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    """The verb alone is killed, as the out-of-memory killer does: the runner lives and keeps the exit code."""
    with transition_held(home):
        job = hook.job_start("oom", WAITS, spec_path=host["spec_path"])
        children = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        until(lambda: bool(children.read_text().split()))
        os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
        event = event_of(HostJobTrigger(host, "oom"))
    assert (event["end"], event["rc"]) == ("done", 137)
    with pytest.raises(e.RemoteJobDied, match="signal 9"):
        parse_answer(c.PatchReport, "patch", event["rc"], event["document"], "", hook.python)


def test_killing_the_waiting_task_ends_the_remote_job(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    with transition_held(home):
        job = hook.job_start("killed", WAITS, spec_path=host["spec_path"])
        trigger = HostJobTrigger(host, "killed")
        asyncio.run(trigger.on_kill())
        until(lambda: gone(job.pid))


def test_deadline_ends_the_remote_job(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    with transition_held(home):
        job = hook.job_start("late", WAITS, spec_path=host["spec_path"])
        assert event_of(HostJobTrigger(host, "late", deadline=time.time() - 1))["end"] == "deadline"
        assert gone(job.pid)


def test_deadline_ends_the_job_where_nobody_asks(hook: GpuHostHook, host: dict[str, Any], home: Path) -> None:
    with transition_held(home):
        hook.job_start("alone", WAITS, spec_path=host["spec_path"], deadline_s=2.0)
        until(lambda: (home / "jobs" / "alone" / "rc").exists(), 60)
        assert event_of(HostJobTrigger(host, "alone"))["end"] == "deadline"


def test_trigger_survives_its_own_serialization(host: dict[str, Any]) -> None:
    for trigger in (
        HostJobTrigger(host, "j", offset=3, outage_s=4.0, deadline=5.0),
        ServerHealthTrigger(host, "production", 1.0, deadline=2.0),
    ):
        path, kwargs = trigger.serialize()
        assert path == f"{type(trigger).__module__}.{type(trigger).__qualname__}"
        assert type(trigger)(**kwargs).serialize() == (path, kwargs)


def test_health_sensor_says_why_not(hook: GpuHostHook, host: dict[str, Any]) -> None:
    event = event_of(ServerHealthTrigger(host, "production", 0.1, deadline=time.time() - 1))
    assert event["end"] == "timeout"
    assert event["status"]["healthy"] is False
    assert event["status"]["problem"]
