"""The hook over a real SSH server: shipping, one verb, and every way in which it can go wrong."""

from __future__ import annotations

import logging
import stat
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hsx_demo.sshd import SshServer, free_port, start_sshd
from hsx_host import contract as c
from hsx_operators import errors as e
from hsx_operators.bundle import Bundle, content_hash
from hsx_operators.hook import GpuHostHook

CONN = "hsx_test_host"


def status(hook: GpuHostHook, spec_path: str) -> c.StatusResult:
    return hook.run_verb(c.StatusResult, ["status"], spec_path=spec_path)


# ------------------------------------------------------------------------------ files


def test_the_program_is_shipped_once_a_content(hook: GpuHostHook, home: Path, bundle: Bundle) -> None:
    there = home / "bundles" / bundle.sha256
    for name, body in bundle.files.items():
        assert (there / name).read_bytes() == body
    inode = there.stat().st_ino
    hook.ship(bundle)
    assert there.stat().st_ino == inode
    files = {"hsx_host/__init__.py": b""}
    other = Bundle(content_hash(files), files)
    hook.ship(other)
    assert sorted(p.name for p in (home / "bundles").iterdir()) == sorted([bundle.sha256, other.sha256])


def test_parallel_shippers_meet_no_half_program(
    connection: Callable[..., None], home: Path, host_python: str, bundle: Bundle
) -> None:
    def ship(_: int) -> str:
        with GpuHostHook(CONN, host_python, str(home)) as hook:
            return hook.ship(bundle)

    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(ship, range(4)))
    assert len(folders) == 1
    assert [p.name for p in (home / "bundles").iterdir()] == [bundle.sha256]
    shipped = {str(p.relative_to(folder)) for folder in folders for p in Path(folder).rglob("*") if p.is_file()}
    assert shipped == set(bundle.files)


def test_a_program_that_was_changed_on_the_host_does_not_run(
    hook: GpuHostHook, home: Path, bundle: Bundle, spec: c.RunSpec, host_python: str
) -> None:
    path = hook.put_document(spec)
    victim = home / "bundles" / bundle.sha256 / "hsx_host" / "status.py"
    victim.write_text(victim.read_text() + "\nprint('changed')\n")
    with GpuHostHook(CONN, host_python, str(home), bundle.sha256) as fresh:
        with pytest.raises(e.HostGarbage, match="not the one that was shipped"):
            status(fresh, path)
        fresh.ship(bundle)
        assert status(fresh, path).mode == "unknown"
    (home / "bundles" / bundle.sha256 / "hsx_host" / "extra.py").write_text("")
    with GpuHostHook(CONN, host_python, str(home), bundle.sha256) as fresh, pytest.raises(e.HostGarbage):
        status(fresh, path)
    assert len(list((home / "bundles").glob(".changed-*"))) == 1


def test_a_connection_that_checks_no_host_key_is_refused(
    connection: Callable[..., None], home: Path, host_python: str
) -> None:
    for extra in ({"no_host_key_check": "true", "host_key": None}, {"allow_host_key_change": "true"}):
        connection(**extra)
        with GpuHostHook(CONN, host_python, str(home)) as hook, pytest.raises(e.ConfigError, match="host's key off"):
            hook.ship()


@pytest.mark.parametrize(
    "word",
    [
        "a 'b' \"c\"",
        "$(touch HIT)",
        "`touch HIT`",
        "; touch HIT #",
        "a\nb",
        "--spec",
        "-rf",
        "ünïcode 漢字 \u202e",
        "*",
        "~",
        "\\",
        "!x",
        "",
    ],
)
def test_words_reach_the_program_as_they_are(hook: GpuHostHook, spec: c.RunSpec, tmp_path: Path, word: str) -> None:
    """A value that a person types, as the argument of a verb and in a path of the spec: no shell ever reads it."""
    with pytest.raises(e.HostError) as said:
        hook.run_verb(c.JobStatus, ["job", "poll", word], spec_path=hook.put_document(spec))
    assert isinstance(said.value, e.HostBadInput)
    odd = replace(spec, data=replace(spec.data, path=f"/nowhere/{word}"))
    with pytest.raises(e.HostBadInput) as said:
        hook.run_verb(c.PlanResult, ["plan"], spec_path=hook.put_document(odd))
    assert word in said.value.value
    assert not list(tmp_path.rglob("HIT"))
    assert not Path("HIT").exists()
    assert not (Path.home() / "HIT").exists()


def test_a_spec_is_its_owners_alone(hook: GpuHostHook, spec: c.RunSpec, home: Path) -> None:
    path = Path(hook.put_document(spec))
    assert path == Path(hook.put_document(spec))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert c.decode(c.RunSpec, path.read_text()) == spec
    assert [p.name for p in (home / "specs").iterdir()] == [path.name]


def test_a_home_that_cannot_be_written_is_named(connection: Callable[..., None], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        GpuHostHook(CONN, "/usr/bin/python3", str(tmp_path / "file" / "hsx")) as hook,
        pytest.raises(e.HostError) as said,
    ):
        hook.ship()
    assert said.value.field == "host.home"
    assert said.value.value == str(tmp_path / "file" / "hsx")


# ------------------------------------------------------------------------------ verbs


def test_a_verb_runs_whatever_stands_in_the_paths(
    hook: GpuHostHook, host: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        plan = hook.run_verb(c.PlanResult, ["plan"], spec_path=host["spec_path"])
    assert (plan.rows, plan.valid, plan.todo) == (6, 6, 6)
    assert [s.rows for s in plan.shards] == [4, 2]
    # no name was read by a shell
    assert not list(tmp_path.rglob("HIT"))
    assert not Path("HIT").exists()
    # neither library tells its own doings at INFO
    assert not [
        r for r in caplog.records if r.name.startswith(("paramiko", "asyncssh")) and r.levelno < logging.WARNING
    ]


def test_bad_input_names_field_and_value(hook: GpuHostHook, spec: c.RunSpec) -> None:
    wrong = replace(spec, data=replace(spec.data, path="/nowhere/x.jsonl"))
    with pytest.raises(e.HostBadInput) as said:
        hook.run_verb(c.PlanResult, ["plan"], spec_path=hook.put_document(wrong))
    assert said.value.value == "/nowhere/x.jsonl"
    assert said.value.fix


def test_a_refusal(hook: GpuHostHook, host: dict[str, Any]) -> None:
    with pytest.raises(e.HostRefused, match="never"):
        hook.run_verb(c.CleanupResult, ["cleanup"], spec_path=host["spec_path"])


def test_a_held_host_says_by_whom(hook: GpuHostHook, host: dict[str, Any], spec: c.RunSpec) -> None:
    other = hook.put_document(replace(spec, run_id="the other run"))
    hook.run_verb(c.Lease, ["acquire"], spec_path=other)
    try:
        with pytest.raises(e.HostTryAgain, match="the other run"):
            hook.run_verb(c.Lease, ["acquire"], spec_path=host["spec_path"])
    finally:
        hook.run_verb(c.Lease, ["release"], spec_path=other)


def test_a_bundle_that_is_gone(hook: GpuHostHook, host: dict[str, Any]) -> None:
    hook.bundle = "0" * 64
    with pytest.raises(e.HostGarbage, match="clear the plan task"):
        status(hook, host["spec_path"])


def test_a_wrong_python(hook: GpuHostHook, host: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "not executable").write_text("#!/bin/sh\n")
    for python in ("/nowhere/python", str(tmp_path / "not executable")):
        hook.python = python
        with pytest.raises(e.WrongHostPython) as said:
            status(hook, host["spec_path"])
        assert (said.value.field, said.value.value) == ("host.python", python)


def test_noise_on_stdout(hook: GpuHostHook, host: dict[str, Any], tmp_path: Path) -> None:
    noisy = tmp_path / "noisy"
    noisy.write_text(f'#!/bin/sh\necho "Welcome to gpu-7"\nexec {hook.python} "$@"\n')
    noisy.chmod(0o755)
    hook.python = str(noisy)
    with pytest.raises(e.HostGarbage, match="Welcome to gpu-7"):
        status(hook, host["spec_path"])


def test_a_verb_that_does_not_end(hook: GpuHostHook, host: dict[str, Any], tmp_path: Path) -> None:
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    hook.python = str(slow)
    with pytest.raises(e.HostUnreachable, match="no answer within"):
        hook.run_verb(c.StatusResult, ["status"], spec_path=host["spec_path"], timeout_s=1.0)


# ------------------------------------------------------------------------------ connections


def open_hook() -> None:
    with GpuHostHook(CONN, "/usr/bin/python3", "/tmp") as hook:
        hook.client()


def test_another_host_key(connection: Callable[..., None], tmp_path: Path) -> None:
    other = start_sshd(tmp_path / "other")
    try:
        connection(host_key=other.host_key)
        with pytest.raises(e.HostKeyMismatch, match="another host key") as said:
            open_hook()
        assert said.value.value == CONN
        connection(host_key=None)  # a host that nobody knows is as little trusted
        with pytest.raises(e.HostKeyMismatch, match="not known"):
            open_hook()
        connection(key_file=other.key_file)
        with pytest.raises(e.HostLoginRefused, match="refuses the login"):
            open_hook()
    finally:
        other.stop()


def test_nobody_there(connection: Callable[..., None]) -> None:
    connection(port=free_port())
    with pytest.raises(e.HostUnreachable, match="can't be reached"):
        open_hook()


def test_a_connection_that_does_not_exist() -> None:
    with (
        GpuHostHook("hsx_no_such_connection", "/usr/bin/python3", "/tmp") as hook,
        pytest.raises(e.ConfigError) as said,
    ):
        hook.client()
    assert said.value.value == "hsx_no_such_connection"


def test_a_broken_key_file(connection: Callable[..., None], sshd: SshServer, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("no key")
    connection(key_file=str(tmp_path / "key"))
    with pytest.raises(e.HsxOperatorError) as said:
        open_hook()
    assert said.value.value == CONN
