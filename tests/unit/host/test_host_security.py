"""Secrets stay where they are, files are their owner's, and an extraction server is reached from this host only."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import clean_up, cmdline, environ, living_guards, make_spec, wait_for, write_spec

from hsx_host import contract as c
from hsx_host import envfile, lease, procid, servers, state
from hsx_host.errors import BadInput, Refused

IN_ENV, IN_FILE, IN_ARGS = "s3cret-of-the-env", "s3cret-of-the-file", "s3cret-of-the-args"


@pytest.fixture
def spec(tmp_path: Path) -> Iterator[c.RunSpec]:
    spec = make_spec(tmp_path)
    secret = tmp_path / "production.env"
    secret.write_text(f"# tokens\n\nexport HF_TOKEN={IN_FILE}\nQUOTED='a b'\n")
    secret.chmod(0o600)
    key = ["--api-key", IN_ARGS]
    spec = replace(
        spec,
        production=replace(
            spec.production,
            env=spec.production.env | {"DB_PASSWORD": IN_ENV},
            env_file=str(secret),
            args=[*spec.production.args, *key],
        ),
    )
    spec = replace(spec, extraction=replace(spec.extraction, env_file=str(secret), args=[*spec.extraction.args, *key]))
    yield spec
    clean_up(spec)


def test_no_secret_is_said_or_left_where_others_may_read_it(spec: c.RunSpec, tmp_path: Path) -> None:
    """The way of a run, verb by verb, with secrets in the profile's environment, its env_file and its arguments."""
    home, path = Path(spec.host.home), write_spec(spec, tmp_path)
    said, others = "", set()

    def verb(*words: str) -> dict[str, object]:
        nonlocal said
        done = subprocess.run(
            [sys.executable, "-m", "hsx_host", *words, "--spec", path], capture_output=True, text=True, umask=0o002
        )
        assert done.returncode == 0, (done.stdout, done.stderr)
        said += done.stdout + done.stderr
        for guard in living_guards(spec):
            others.add(" ".join(cmdline(guard.pid)))
        return json.loads(done.stdout)

    up = verb("serve", "production")
    assert environ(int(str(up["pid"])))["HF_TOKEN"] == IN_FILE
    assert environ(int(str(up["pid"])))["QUOTED"] == "a b"
    assert environ(int(str(up["pid"])))["DB_PASSWORD"] == IN_ENV
    verb("acquire")
    verb("serve", "extraction")
    verb("status", "--health")
    assert verb("restore")["problems"] == []
    for secret in (IN_ENV, IN_FILE, IN_ARGS):
        assert secret not in said
        assert not [line for line in others if secret in line]
        for file in (p for p in home.rglob("*") if p.is_file()):
            if secret.encode() in file.read_bytes():
                assert stat.S_IMODE(file.stat().st_mode) == 0o600, file
                assert file.name in ("spec.json", "launch_base.json"), file
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    # What the server writes itself, with production's umask, lies in a folder of hsx's that is private.
    ours = [p for p in home.rglob("*") if not (p.is_file() and p.is_relative_to(home / "spool"))]
    loose = [p for p in ours if not p.is_symlink() and stat.S_IMODE(p.stat().st_mode) & 0o077]
    assert loose == []


def test_a_server_that_tells_its_secrets_and_dies(spec: c.RunSpec, tmp_path: Path) -> None:
    """The end of its log stands in the error, in the journal and in what a page says: without them."""
    spec = replace(spec, production=replace(spec.production, env=spec.production.env | {"FAKE_DIE": "yes"}))
    said = subprocess.run(
        [sys.executable, "-m", "hsx_host", "serve", "production", "--spec", write_spec(spec, tmp_path)],
        capture_output=True,
        text=True,
    )
    assert said.returncode == 75, (said.stdout, said.stderr)
    assert "--api-key" in said.stdout, "the end of the log is told"
    journal = "\n".join(state.journal_tail(spec, 1000))
    for secret in (IN_ENV, IN_FILE, IN_ARGS):
        assert secret not in said.stdout + said.stderr + journal


def test_every_value_of_the_env_file_is_a_secret(spec: c.RunSpec) -> None:
    """Whatever its name; of the profile's own values, those whose names say so."""
    file = Path(spec.production.env_file)
    file.write_text("PGPASS=zz-pg\nLICENSE_KEY=zz-license\nNCCL_PROTO=zz-other\nSHORT=1\n")
    settings = replace(spec.production, env={"NCCL_PROTO": "LL-of-the-profile", "DB_PASSWORD": "zz-db"})
    text = "zz-pg zz-license zz-other zz-db 1 LL-of-the-profile"
    told = servers.without_secrets(text, settings, envfile.variables(settings))
    assert told == "*** *** *** *** 1 LL-of-the-profile"


def test_a_line_of_an_env_file_ends_at_its_newline_only(spec: c.RunSpec) -> None:
    file = Path(spec.production.env_file)
    odd = {f"V{i}": f"a{sep}B{i}=c" for i, sep in enumerate("\x0b\x0c\x1c\x1e\x85\u2028\u2029")}
    file.write_text("\n".join(f"{k}={v}" for k, v in odd.items()) + "\n", encoding="utf-8")
    assert envfile.read(str(file)) == odd


def test_a_refusal_tells_no_key(spec: c.RunSpec) -> None:
    wrong = replace(spec.extraction, args=[*spec.extraction.args, "--pp-size", "2"])
    with pytest.raises(Refused) as said:
        servers.check_extraction(wrong)
    assert IN_ARGS not in str(said.value)


def test_an_env_file_that_others_may_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.env"
    file.write_text("A=1\n")
    for mode in (0o644, 0o620, 0o601):
        file.chmod(mode)
        with pytest.raises(BadInput, match=r"production\.env_file .*others may read it"):
            envfile.read(str(file))
    file.chmod(0o600)
    assert envfile.read(str(file)) == {"A": "1"}
    file.write_text("A=1\nno equals\n")
    with pytest.raises(BadInput, match="line 2 is not NAME=VALUE"):
        envfile.read(str(file))
    with pytest.raises(BadInput, match="can't be read"):
        envfile.read(str(tmp_path / "none"))


def test_what_a_log_shows_of_a_command_line() -> None:
    args = ["--api-key", "x", "--hf-token=y", "--max-total-tokens", "9", "--ssl-keyfile-password", "-z", "--port", "1"]
    text = " ".join(servers.shown(args))
    assert text == "--api-key *** --hf-token=*** --max-total-tokens 9 --ssl-keyfile-password -z --port 1"
    told = servers.differences(["--api-key", "x1"], ["--api-key", "y2"])
    assert "x1" not in str(told)
    assert "y2" not in str(told)


def test_an_extraction_server_that_listens_elsewhere_is_refused() -> None:
    servers.check_bound(1, {"127.0.0.1", "::1"})
    with pytest.raises(Refused, match=r"can be reached from outside: it listens on 0\.0\.0\.0"):
        servers.check_bound(1, {"127.0.0.1", "0.0.0.0"})


def test_a_lease_of_a_guard_that_is_another_process_by_now_has_none(spec: c.RunSpec) -> None:
    """A stale pid: the number lives, as somebody else."""
    from hsx_host import guards

    granted = guards.acquire(spec)
    record = state.read_document(guards.GuardRecord, state.home(spec) / "state" / "guard.json")
    assert record is not None
    for guard in living_guards(spec):
        procid.send(guard, 9)
    me = procid.identify(os.getpid())
    assert me is not None
    stale = replace(record, processes=[[me.pid, me.start - 1]])
    state.write_document(state.home(spec) / "state" / "guard.json", stale)
    assert guards.living(spec, granted) == []
    guards.renew(spec)
    wait_for(lambda: living_guards(spec))
    assert lease.read(spec) is not None
