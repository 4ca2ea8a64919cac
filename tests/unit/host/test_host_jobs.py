"""Detached jobs: start, poll, kill, and what goes wrong with them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from host_lifecycle import events, make_spec, verb, wait_for, write_spec

from hsx_host import contract as c
from hsx_host import jobs, lease, procid, state
from hsx_host.errors import BadInput

# A job that runs until its lease is given up: the guard of a lease that a test holds.


def guard_command(spec: c.RunSpec, tmp_path: Path) -> tuple[str, list[str]]:
    path = write_spec(spec, tmp_path)
    return path, ["guard", "--since", repr(lease.acquire(spec).since)]


def end(spec: c.RunSpec, job: str) -> c.JobStatus:
    lease.release(spec)
    return wait_for(lambda: (s := jobs.poll(spec, job, 0)).state != "running" and s)


def test_a_job_outlives_its_starter_and_is_found_again(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    first = verb("job", "start", "j", "--spec", path, "--", *command)
    again = verb("job", "start", "j", "--spec", path, "--", *command)
    assert first["state"] == again["state"] == "running"
    assert first["pid"] == again["pid"]
    assert os.getsid(first["pid"]) == first["pid"]
    done = end(spec, "j")
    assert (done.state, done.rc) == ("done", 0)
    assert json.loads(done.document)["type"] == "RestoreReport"
    assert verb("job", "start", "j", "--spec", path, "--", *command)["rc"] == 0
    assert events(spec).count("job started") == 1


def test_starts_at_once_run_one_job(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: verb("job", "start", "j", "--spec", path, "--", *command), range(4)))
    assert len({f["pid"] for f in found}) == 1
    assert events(spec).count("job started") == 1
    end(spec, "j")


def test_the_job_holds_no_file_of_its_starter(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    read, write = os.pipe()
    os.set_inheritable(write, True)
    subprocess.run(
        [sys.executable, "-m", "hsx_host", "job", "start", "j", "--spec", path, "--", *command],
        pass_fds=(write,), check=True, stdout=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(write)
    assert os.read(read, 1) == b""  # the end of the pipe: the running job has it not
    assert jobs.poll(spec, "j", 0).state == "running"
    assert os.readlink(f"/proc/{jobs.poll(spec, 'j', 0).pid}/cwd") == spec.host.home
    end(spec, "j")


def test_a_relative_pythonpath_holds_in_the_job(spec: c.RunSpec, tmp_path: Path) -> None:
    path, _ = guard_command(spec, tmp_path)
    include = Path(jobs.__file__).parents[1]
    argv = [sys.executable, "-m", "hsx_host", "job", "start", "j", "--spec", path, "--", "status"]
    subprocess.run(argv, cwd=include, env={**os.environ, "PYTHONPATH": "."}, check=True, stdout=subprocess.DEVNULL)
    done = wait_for(lambda: (s := jobs.poll(spec, "j", 0)).state != "running" and s)
    assert (done.state, done.rc) == ("done", 0), done.log


def test_a_job_imports_nothing_of_the_home(spec: c.RunSpec, tmp_path: Path) -> None:
    """A job, as a guard, runs in the home, where others of the login's programs may write."""
    path, _ = guard_command(spec, tmp_path)
    for module in ("psutil", "requests", "hsx_host"):
        (state.folder(spec) / f"{module}.py").write_text("raise SystemExit('PLANTED')\n")
    verb("job", "start", "j", "--spec", path, "--", "status", "--health")
    done = wait_for(lambda: (s := jobs.poll(spec, "j", 0)).state != "running" and s)
    assert (done.state, done.rc) == ("done", 0), done.log


def test_kill_unwinds_the_verb(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    verb("job", "start", "j", "--spec", path, "--", *command)
    pid = jobs.poll(spec, "j", 0).pid
    wait_for(lambda: b"hsx_host" in b"".join(_cmdlines(pid)))
    wait_for(lambda: _catches_sigterm(pid))
    killed = verb("job", "kill", "j", "--spec", path)
    assert (killed["state"], killed["rc"]) == ("done", 75)
    assert json.loads(killed["document"])["kind"] == "again"
    wait_for(lambda: procid.start_ticks(pid) is None)


def test_kill_without_grace_leaves_nothing(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    verb("job", "start", "j", "--spec", path, "--", *command)
    pid = jobs.poll(spec, "j", 0).pid
    children = wait_for(lambda: psutil.Process(pid).children(recursive=True))
    for child in children:
        child.suspend()  # else one that is quick enough ends of the SIGTERM that comes first
    killed = jobs.kill(spec, "j", 0.0)
    assert (killed.state, killed.rc) == ("done", 137)
    wait_for(lambda: not any(procid.start_ticks(p) for p in (pid, *(ch.pid for ch in children))))


def test_a_dead_job_is_seen_and_started_anew_only_when_asked(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    first = verb("job", "start", "j", "--spec", path, "--", *command)
    for child in psutil.Process(first["pid"]).children(recursive=True):
        child.kill()
    os.kill(first["pid"], signal.SIGKILL)
    dead = wait_for(lambda: (s := jobs.poll(spec, "j", 0)).state != "running" and s)
    if dead.state == "done":  # the runner wrote the code before it was killed itself
        assert dead.rc == 137
    assert verb("job", "start", "j", "--spec", path, "--", *command)["state"] == dead.state
    Path(spec.host.home, "jobs", "j", "stderr").write_text("old log\n")
    anew = verb("job", "start", "j", "--again", "--spec", path, "--", *command)
    assert anew["state"] == "running"
    assert anew["pid"] != first["pid"]
    assert Path(spec.host.home, "jobs", "j", "stderr.1").read_text() == "old log\n"
    assert verb("job", "start", "j", "--again", "--spec", path, "--", *command)["pid"] == anew["pid"]
    end(spec, "j")


def test_a_runner_that_is_gone_without_a_code_is_dead(spec: c.RunSpec) -> None:
    where = state.folder(spec, "jobs", "j")
    me = procid.identify(os.getpid())
    assert me is not None
    for boot, start in ((procid.boot_id(), me.start + 1), ("another boot", me.start)):
        state.write_document(where / "job.json", jobs.JobRecord("j", me.pid, start, boot, "r", [], 0.0))
        assert jobs.poll(spec, "j", 0).state == "dead"


def test_a_killed_verb_has_a_code(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    runner = verb("job", "start", "j", "--spec", path, "--", *command)["pid"]
    wait_for(lambda: psutil.Process(runner).children())[0].kill()
    done = wait_for(lambda: (s := jobs.poll(spec, "j", 0)).state != "running" and s)
    assert (done.state, done.rc, done.document) == ("done", 137, "")


def test_log_comes_in_whole_lines_and_chunks(spec: c.RunSpec) -> None:
    where = state.folder(spec, "jobs", "j")
    me = procid.identify(os.getpid())
    assert me is not None
    state.write_document(where / "job.json", jobs.JobRecord("j", me.pid, me.start, procid.boot_id(), "r", [], 0.0))
    text = "".join(f"line {i} ä€😀\n" for i in range(20_000)) + "unfinished"
    (where / "stderr").write_text(text)
    got, offset = "", 0
    while True:
        s = jobs.poll(spec, "j", offset)
        assert len(s.log.encode()) <= jobs.CHUNK_BYTES
        assert s.offset == offset + len(s.log.encode())
        if not s.log:
            break
        assert s.log.endswith("\n")
        got, offset = got + s.log, s.offset
    assert got == text[: -len("unfinished")]
    state.write_text(where / "rc", "0\n")
    assert jobs.poll(spec, "j", offset).log == "unfinished"


def test_a_line_longer_than_a_chunk_is_cut_between_characters(spec: c.RunSpec) -> None:
    where = state.folder(spec, "jobs", "j")
    me = procid.identify(os.getpid())
    assert me is not None
    state.write_document(where / "job.json", jobs.JobRecord("j", me.pid, me.start, procid.boot_id(), "r", [], 0.0))
    for lead in range(4):
        text = "x" * lead + "😀" * 30_000 + "\n"
        (where / "stderr").write_text(text)
        got, offset = "", 0
        while s := jobs.poll(spec, "j", offset).log:
            got, offset = got + s, offset + len(s.encode())
        assert got == text


def test_poll_renews_the_own_lease_only(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    before = lease.acquire(spec)
    verb("job", "poll", "j", "--spec", path)
    after = lease.read(spec)
    assert after is not None
    assert after.expires > before.expires
    other = make_spec(tmp_path, "run-2")
    verb("job", "poll", "j", "--spec", write_spec(other, tmp_path, "other.json"))
    assert lease.read(spec) == after


def test_absent_and_bad_ids(spec: c.RunSpec, tmp_path: Path) -> None:
    assert jobs.poll(spec, "nobody", 0).state == "absent"
    for bad in ("", "../x", "a/b", ".hidden", "a b", "x" * 201):
        with pytest.raises(BadInput, match="job id"):
            jobs.poll(spec, bad, 0)
    path = write_spec(spec, tmp_path)
    assert verb("job", "start", "j", "--spec", path, check=2)["field"] == "VERB"
    assert verb("job", "start", "j", "--spec", path, "--", "rm", check=2)["field"] == "VERB"


def test_poll_is_light(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    code = (
        "import sys; from hsx_host.__main__ import main; main(sys.argv[1:]);"
        "sys.exit(' '.join({'torch','requests','numpy','psutil','sglang'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "job", "poll", "j", "--spec", path], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def _cmdlines(pid: int) -> list[bytes]:
    return [" ".join(ch.cmdline()).encode() for ch in psutil.Process(pid).children()]


def _catches_sigterm(runner: int) -> bool:
    """Whether the verb has its handler already (bit 15 of SigCgt)."""
    for child in psutil.Process(runner).children():
        status = Path(f"/proc/{child.pid}/status").read_text()
        caught = int(next(x for x in status.splitlines() if x.startswith("SigCgt")).split()[1], 16)
        return bool(caught >> (signal.SIGTERM - 1) & 1)
    return False


def test_a_verb_whose_runner_was_killed_is_still_the_job(spec: c.RunSpec, tmp_path: Path) -> None:
    """No second copy beside it, and it can be ended."""
    path, command = guard_command(spec, tmp_path)
    first = verb("job", "start", "j", "--spec", path, "--", *command)
    child = wait_for(lambda: psutil.Process(first["pid"]).children())[0]
    os.kill(first["pid"], signal.SIGKILL)
    wait_for(lambda: procid.start_ticks(first["pid"]) is None)
    assert jobs.poll(spec, "j", 0).state == "running"
    assert verb("job", "start", "j", "--again", "--spec", path, "--", *command)["state"] == "running"
    assert events(spec).count("job started") == 1
    assert jobs.kill(spec, "j", 10.0).state != "running"
    wait_for(lambda: procid.start_ticks(child.pid) is None)


def test_the_deadline_is_the_host_s_too(spec: c.RunSpec, tmp_path: Path) -> None:
    """Nobody asks about the job, and it ends."""
    path, command = guard_command(spec, tmp_path)
    verb("job", "start", "j", "--deadline", "3", "--spec", path, "--", *command)
    done = wait_for(lambda: Path(spec.host.home, "jobs", "j", "rc").exists() and jobs.poll(spec, "j", 0))
    assert (done.state, done.rc) == ("done", c.JOB_DEADLINE)
    assert "deadline of 3 s has passed" in done.log
    wait_for(lambda: procid.start_ticks(done.pid) is None)


def test_a_reader_goes_on_where_the_last_one_stopped(spec: c.RunSpec) -> None:
    where = state.folder(spec, "jobs", "j")
    me = procid.identify(os.getpid())
    assert me is not None
    state.write_document(where / "job.json", jobs.JobRecord("j", me.pid, me.start, procid.boot_id(), "r", [], 0.0))
    (where / "stderr").write_text("one\ntwo\n")
    first = jobs.poll(spec, "j", 0, resume=True)
    assert first.log == "one\ntwo\n"
    jobs.poll(spec, "j", first.offset)  # says that all before it was shown
    (where / "stderr").write_text("one\ntwo\nthree\n")
    assert jobs.poll(spec, "j", 0, resume=True).log == "three\n"
    assert jobs.poll(spec, "j", 0).log == "one\ntwo\nthree\n"


def test_an_offset_that_no_log_has_is_refused(spec: c.RunSpec, tmp_path: Path) -> None:
    path = write_spec(spec, tmp_path)
    verb("job", "start", "j", "--spec", path, "--", "status")
    for offset in ("-1", "9" * 40):
        answer = verb("job", "poll", "j", "--offset", offset, "--spec", path, check=2)
        assert answer["field"] == "--offset"


def test_the_end_of_a_run_ends_the_jobs_that_its_tasks_have_left(spec: c.RunSpec, tmp_path: Path) -> None:
    path, command = guard_command(spec, tmp_path)
    left = verb("job", "start", "left", "--spec", path, "--", *command)["pid"]
    other = write_spec(replace(spec, run_id="run-2"), tmp_path, "other.json")
    theirs = verb("job", "start", "theirs", "--spec", other, "--", *command[:2], command[2], "--spec", path)["pid"]
    assert jobs.end_left(spec, 10.0) == ["left"]
    wait_for(lambda: procid.start_ticks(left) is None)
    assert procid.start_ticks(theirs)
    assert jobs.end_left(spec, 10.0) == []
    end(spec, "theirs")


@pytest.mark.parametrize("how", ["empty", "foreign", "unreadable"])
def test_the_files_of_an_old_job_keep_no_run_from_its_end(spec: c.RunSpec, tmp_path: Path, how: str) -> None:
    path, command = guard_command(spec, tmp_path)
    verb("job", "start", "left", "--spec", path, "--", *command)
    broken = state.home(spec) / "jobs" / "an-old-one" / "job.json"
    broken.parent.mkdir()
    if how == "unreadable":
        broken.mkdir()
    else:
        broken.write_text("" if how == "empty" else '{"type":"Other","version":1}')
    assert jobs.end_left(spec, 10.0) == ["left"]
