"""Production after a run: word by word as it was, at another try, beside a soak and on a full disk."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from host_lifecycle import (
    clean_up,
    cmdline,
    environ,
    events,
    listens,
    live_lease,
    make_spec,
    start_by_hand,
    verbless_mode,
    wait_for,
    with_env,
)

from hsx_host import (
    borrow,
    health,
    inherited,
    lease,
    processes,
    procid,
    restore,
    serve,
    state,
)
from hsx_host import contract as c
from hsx_host.errors import TryAgain


def test_production_that_does_not_come_back_at_the_first_try(spec: c.RunSpec, tmp_path: Path, no_pauses: None) -> None:
    once = with_env(spec, "production", FAKE_DIE_ONCE=str(tmp_path / "died"))
    assert serve.ensure(once, "production").changed
    assert events(spec).count("production did not come back") == 1
    assert verbless_mode(spec) == "production"


@pytest.mark.usefixtures("no_pauses")
def test_a_server_that_dies_in_the_soak_is_told_and_stopped(spec: c.RunSpec) -> None:
    """Healthy, a first token, and then it dies at the 100th request."""
    bad = with_env(spec, "extraction", FAKE_DIE_AT="100")
    bad = replace(bad, extraction=replace(bad.extraction, soak_requests=128))
    live_lease(spec)
    with pytest.raises(TryAgain, match=r"answers /health, but request \d+ of 128 of the soak failed"):
        serve.ensure(bad, "extraction")
    assert verbless_mode(spec) == "stopped"
    assert not listens(spec.extraction.port)


def test_a_soak_that_fails_does_not_wait_for_its_rest(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def slow(settings: c.ServerSettings, ids: list[int], timeout_s: float) -> str:
        asked.append(1)
        return "no answer"

    monkeypatch.setattr(health, "_generate", slow)
    with pytest.raises(TryAgain, match="request 1 of 1000"):
        health.soak(replace(spec.production, soak_requests=1000), "production")
    assert len(asked) < 1000


def test_production_comes_back_word_by_word(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    """Its own spelling of flags, its umask, its limits and CPUs, and its way to name the interpreter."""
    args = [*spec.production.args, "--tp", "1"]
    spec = replace(spec, production=replace(spec.production, args=[*spec.production.args, "--tp-size=1"]))
    how = (
        "import os, resource, sys; os.umask(0o027); resource.setrlimit(resource.RLIMIT_NOFILE, (700, 900));"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))}); os.nice(3); os.execvp('python', sys.argv[1:])"
    )
    old = subprocess.Popen(
        [sys.executable, "-c", how, "python", "-m", "sglang.launch_server", *args],
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "FROM": "hand", **spec.production.env},
        cwd="/usr",
        start_new_session=True,
    )
    by_hand.append(old)
    wait_for(lambda: listens(spec.production.port))

    def facts(pid: int) -> tuple[object, ...]:
        p = psutil.Process(pid)
        umask = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("Umask")]
        limit = p.rlimit(resource.RLIMIT_NOFILE)
        return cmdline(pid), environ(pid), os.readlink(f"/proc/{pid}/cwd"), umask, limit, p.cpu_affinity(), p.nice()

    before = facts(old.pid)
    assert cmdline(old.pid)[0] == "python"
    serve.ensure(spec, "production")
    live_lease(spec)
    serve.ensure(spec, "extraction")
    back = serve.ensure(spec, "production")
    assert back.pid != old.pid
    assert facts(back.pid) == before
    assert restore.proved(spec, back).problems == []


def test_what_is_not_as_it_was_is_told(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    by_hand.append(start_by_hand(spec))
    serve.ensure(spec, "production")
    live_lease(spec)
    serve.ensure(spec, "stopped")
    other = start_by_hand(spec, env={**spec.production.env, "FROM_HAND": "no", "HF_HOME": "/x"})
    by_hand.append(other)
    up = serve.ensure(spec, "production")
    told = inherited.differences(spec, procid.ProcId(up.pid, 0), [])
    assert told == []  # taken over: it is what production is now
    kept = state.read_document(inherited.LaunchBase, Path(spec.host.home, "state", "launch_base.json"))
    assert kept is not None
    kept = replace(kept, env=kept.env | {"FROM_HAND": "yes"}, umask=0o077, argv=[*kept.argv, "--tp", "1"])
    state.write_document(Path(spec.host.home, "state", "launch_base.json"), kept)
    text = "; ".join(inherited.differences(spec, procid.ProcId(up.pid, 0), []))
    assert "its environment differs in FROM_HAND" in text
    assert "its umask is 0022, not 0077" in text


def test_cpus_nice_and_user_of_production_are_compared(spec: c.RunSpec, by_hand: list[subprocess.Popen[bytes]]) -> None:
    """What nobody can give back (a user, a lower nice) is told as well; an older record says nothing."""
    by_hand.append(start_by_hand(spec))
    proc = procid.ProcId(serve.ensure(spec, "production").pid, 0)
    file = Path(spec.host.home, "state", "launch_base.json")
    kept = state.read_document(inherited.LaunchBase, file)
    assert kept is not None
    has = psutil.Process(proc.pid)
    assert (kept.affinity, kept.nice) == (has.cpu_affinity(), has.nice())
    assert (kept.uid, kept.gid) == (os.geteuid(), os.getegid())
    for other, word in (
        (replace(kept, affinity=[*kept.affinity, 4095]), "CPUs"),
        (replace(kept, nice=has.nice() - 1), f"its nice is {has.nice()}, not {has.nice() - 1}"),
        (replace(kept, uid=4711), f"its user id is {os.geteuid()}, not 4711"),
        (replace(kept, gid=4711), f"its group id is {os.getegid()}, not 4711"),
    ):
        state.write_document(file, other)
        told = inherited.differences(spec, proc, [])
        assert len(told) == 1
        assert word in told[0]
    older = json.loads(file.read_text())
    for name in ("nice", "uid", "gid"):
        del older[name]
    file.write_text(json.dumps(older))
    assert inherited.differences(spec, proc, []) == []


@pytest.fixture
def own_disk(tmp_path: Path) -> Iterator[Path]:
    """The host's home as a file system of its own, small; only where this user may mount one."""
    home = tmp_path / "home"
    home.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(home)], capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    yield home
    while os.path.ismount(home):  # lazily: a server may still have its folder there
        subprocess.run(["umount", "--lazy", str(home)], check=True)


@pytest.mark.parametrize("how", ["full", "read-only"])
def test_production_comes_back_where_the_disk_takes_nothing(
    own_disk: Path, tmp_path: Path, how: str, by_hand: list[subprocess.Popen[bytes]]
) -> None:
    """No record, no journal, no log can be written: the guard brings production up all the same."""
    spec = replace(make_spec(tmp_path), lease_ttl_s=10.0)
    try:
        by_hand.append(start_by_hand(spec))
        serve.ensure(spec, "production")
        borrow.acquire(spec, by_step=False)
        gone = serve.ensure(spec, "extraction").pid
        if how == "full":
            with suppress(OSError), (own_disk / "ballast").open("wb", buffering=0) as f:
                while True:
                    f.write(bytes(4096))
        else:
            subprocess.run(["mount", "--bind", str(own_disk), str(own_disk)], check=True)
            subprocess.run(["mount", "-o", "remount,bind,ro", str(own_disk)], check=True)
        with pytest.raises(OSError, match=r"No space left|Read-only"):
            (own_disk / "proof").write_text("x" * 8192)
        wait_for(lambda: not procid.start_ticks(gone) and not health.problem(spec.production))
        up = processes.listeners(spec.production.port)
        if how == "full":
            wait_for(lambda: lease.read(spec) is None)
            (own_disk / "ballast").unlink()
        else:
            subprocess.run(["umount", "--lazy", str(own_disk)], check=True)
        wait_for(lambda: lease.read(spec) is None)
        again = serve.ensure(spec, "production")
        assert (again.changed, [again.pid]) == (False, up)
        assert restore.proved(spec, again).problems == []
    finally:
        clean_up(spec)
