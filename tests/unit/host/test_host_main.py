"""The command line's contract: one document on stdout, the exit codes, errors that name the field."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from host_lifecycle import make_spec, verb, wait_for, write_spec

from hsx_host import __main__ as program
from hsx_host import contract as c
from hsx_host import progress, verbs


@pytest.fixture
def spec_file(tmp_path: Path) -> str:
    return write_spec(make_spec(tmp_path), tmp_path)


def pretend(monkeypatch: pytest.MonkeyPatch, run: Any) -> None:
    """Make ``status`` do something else."""
    module = SimpleNamespace(HELP="h", __doc__="d", add_arguments=lambda p: None, run=run)
    monkeypatch.setattr(verbs, "load", lambda name: module)


def answer(capfd: pytest.CaptureFixture[str], argv: list[str]) -> tuple[int, Any, str]:
    code = program.main(argv)
    out, err = capfd.readouterr()
    assert out.count("\n") == 1
    return code, json.loads(out), err


def test_whatever_prints_the_document_stands_alone(spec_file: str) -> None:
    code = """
import os, subprocess, sys
from types import SimpleNamespace
from hsx_host import __main__ as program, contract as c, verbs
def noisy(spec, args):
    print("a library says")
    os.write(1, b"a C library says\\n")
    subprocess.run(["echo", "a child says"], check=True)
    return c.Lease("r", 1.0, 2.0)
verbs.load = lambda name: SimpleNamespace(HELP="h", add_arguments=lambda p: None, run=noisy)
sys.exit(program.main(sys.argv[1:]))
"""
    argv = [sys.executable, "-c", code, "status", "--spec", spec_file]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["type"] == "Lease"
    assert done.stdout.count("\n") == 1
    assert all(f"{who} says" in done.stderr for who in ("a library", "a C library", "a child"))


def test_a_bug_is_told_as_one(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], spec_file: str
) -> None:
    def broken(spec: c.RunSpec, args: Any) -> Any:
        raise ValueError("oh")

    pretend(monkeypatch, broken)
    code, document, err = answer(capfd, ["status", "--spec", spec_file])
    assert (code, document["kind"], document["message"]) == (1, "bug", "ValueError: oh")
    assert "Traceback" in err


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda b: b["production"].update(portt=1), "production.portt"),
        (lambda b: b["production"].pop("port"), "production.port"),
        (lambda b: b["data"].update(shard_size="4"), "data.shard_size"),
        (lambda b: b.update(version=99), "--spec"),
    ],
)
def test_a_broken_spec_names_the_field(tmp_path: Path, spec_file: str, change: Any, field: str) -> None:
    body = json.loads(Path(spec_file).read_text())
    change(body)
    Path(spec_file).write_text(json.dumps(body))
    error = verb("status", "--spec", spec_file, check=2)
    assert error["kind"] == "bad_input"
    assert field in error["field"] or field in error["message"]


def test_bad_command_lines(tmp_path: Path, spec_file: str) -> None:
    assert verb("status", "--spec", str(tmp_path / "none.json"), check=2)["field"] == "--spec"
    Path(spec_file).write_text("{")
    assert "not JSON" in verb("status", "--spec", spec_file, check=2)["message"]
    assert verb("plan", check=2)["field"] == "command line"
    assert verb("status", check=2)["field"] == "--spec"  # it may go without, on a host that had a run
    assert "preflight" in verb("no-such-verb", check=2)["fix"]


def test_help_of_all_and_of_each() -> None:
    done = subprocess.run([sys.executable, "-m", "hsx_host", "--help"], capture_output=True, text=True, check=True)
    for name in verbs.VERBS:
        assert f"\n  {name} " in done.stdout
    for name in verbs.VERBS:
        module = verbs.load(name)
        assert module.HELP
        assert "\n" not in module.HELP
        module.add_arguments(ArgumentParser())
    one = subprocess.run([sys.executable, "-m", "hsx_host", "serve", "-h"], capture_output=True, text=True, check=True)
    assert all(word in one.stdout for word in ("Example", "exit codes", "Result", "75"))


def test_sigterm_is_a_clean_stop(tmp_path: Path) -> None:
    from hsx_host import lease

    spec = make_spec(tmp_path)
    since = lease.acquire(spec).since
    path = write_spec(spec, tmp_path)
    guard = subprocess.Popen(
        [sys.executable, "-m", "hsx_host", "guard", "--since", repr(since), "--spec", path],
        stdout=subprocess.PIPE,
        text=True,
    )
    status = Path(f"/proc/{guard.pid}/status")
    wait_for(lambda: int(status.read_text().split("SigCgt:\t")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1)
    guard.terminate()
    out, _ = guard.communicate()
    assert guard.returncode == 75
    assert json.loads(out)["kind"] == "again"


def test_progress_lines(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1000.0 + now[0]))
    p = progress.Progress("extract", 100)
    for done in range(0, 101, 10):
        p.update(done, tokens=done * 7, bytes=done * 9)
        now[0] += 0.25
    p.update(100)  # the end again: told once
    lines = [json.loads(x) for x in capfd.readouterr().err.splitlines()]
    assert [x["done"] for x in lines] == [0, 40, 80, 100]  # one a second, and the last
    assert lines[1] == {
        "progress": "extract", "done": 40, "total": 100, "tokens": 280, "bytes": 360, "rate": 40.0, "tok_s": 280.0,
        "eta": 1.5, "at": 1001.0,
    }  # fmt: skip


def test_a_terminal_gets_lines_and_a_pipe_the_document(tmp_path: Path, spec_file: str) -> None:
    """Progress too. What a person can't read is for programs."""
    for name, word in (("status", "held by: nobody"), ("recover", "nothing: nobody has borrowed the host")):
        master, slave = pty.openpty()
        argv = [sys.executable, "-m", "hsx_host", name, "--spec", spec_file]
        subprocess.run(argv, stdin=slave, stdout=slave, stderr=slave, check=True)
        text = os.read(master, 1 << 16).decode()
        for fd in (master, slave):
            os.close(fd)
        assert word in text
        assert "{" not in text
        piped = subprocess.run(argv, capture_output=True, text=True, check=True)
        assert json.loads(piped.stdout)["type"].endswith(("Result", "Report"))


def test_a_person_sees_progress_as_words(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda self: True)
    progress.Progress("soak production", 3).update(3)
    assert capfd.readouterr().err.endswith(" soak production: 3 of 3\n")
