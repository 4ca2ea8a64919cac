"""Whatever a person types or a path holds, no shell acts on it: it arrives word by word, or is refused by its field."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.exceptions import ParamValidationError
from fleet_profile import body, dag_bag, write

from hsx_host import contract as c
from hsx_operators.answers import verb_command
from hsx_operators.base import job_name
from hsx_operators.bundle import check_command
from hsx_operators.errors import ConfigError, HsxOperatorError
from hsx_operators.hook import with_spec
from hsx_operators.profile import load_profile
from hsx_operators.spec import PARAMS, build_spec, check_known
from hsx_operators.unattended import Nightly
from hsx_operators.window import window_end

WORDS = [
    "a b",
    "it's",
    'say "hi"',
    "$(touch HIT)",
    "`touch HIT`",
    "${IFS}touch${IFS}HIT",
    "; touch HIT #",
    "&& touch HIT",
    "| touch HIT",
    "> HIT",
    "a\nb",
    "a\r\nb",
    "\ttab",
    "-rf",
    "--spec",
    "--",
    "ünïcode 漢字 \u202e\u200b",
    "~root",
    "*",
    "\\",
    "!x",
    "%s{0}",
    "{{ 7 * 7 }}",
    "",
]
SPEC_PATH = "/srv/hsx/specs/0123.json"
TOLD = """#!/bin/sh
exec /usr/bin/env python3 -c 'import json, os, sys; print(json.dumps([sys.argv[1:], os.environ["PYTHONPATH"]]))' "$@"
"""


def run_in_a_shell(command: str, folder: Path) -> tuple[list[str], str]:
    """What the host's login shell makes of a command: the program's arguments, and its PYTHONPATH."""
    done = subprocess.run(["sh", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert not (folder / "HIT").exists()
    words, path = json.loads(done.stdout)
    return words, path


@pytest.fixture
def odd_program(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """The host's Python at a path with an odd word in it; it tells how it was called."""
    folder = tmp_path / f"x{request.param}"
    folder.mkdir()
    program = folder / "python"
    program.write_text(TOLD)
    program.chmod(0o700)
    return program


@pytest.mark.parametrize("odd_program", [w for w in WORDS if w], indirect=True, ids=repr)
def test_paths_of_the_host(odd_program: Path, tmp_path: Path) -> None:
    """Python, home (the bundle's folder) and the spec's path."""
    odd = str(odd_program.parent)
    command = verb_command(str(odd_program), odd, with_spec(["plan"], odd))
    assert run_in_a_shell(command, tmp_path) == (["-m", "hsx_host", "plan", "--spec", odd], odd)
    checked = subprocess.run(
        ["sh", "-c", check_command(str(odd_program), odd, "0" * 64)], cwd=tmp_path, capture_output=True, text=True
    )
    assert not (tmp_path / "HIT").exists()
    assert checked.stderr == "" or "KeyError" in checked.stderr  # the stand-in asks for a PYTHONPATH that it has not


@pytest.mark.parametrize("word", WORDS, ids=repr)
def test_arguments_of_a_verb(word: str, tmp_path: Path) -> None:
    program = tmp_path / "python"
    program.write_text(TOLD)
    program.chmod(0o700)
    verb = ["job", "start", word, "--", "extract", word]
    told, _ = run_in_a_shell(verb_command(str(program), "/b", with_spec(verb, SPEC_PATH)), tmp_path)
    assert [w for w in told[2:] if w not in ("--spec", SPEC_PATH)] == [w for w in verb if w != "--spec"]


@pytest.fixture
def dag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DAG:
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    write(tmp_path, "p", body())
    found: DAG = dag_bag().dags["hsx_extraction"]
    return found


@pytest.mark.parametrize("word", [w for w in WORDS if w.strip()], ids=repr)
@pytest.mark.parametrize("name", PARAMS)
def test_params(dag: DAG, name: str, word: str) -> None:
    """The form refuses the word, or ``plan`` does, or it stands in the frozen spec as it was typed; the spec travels as
    a file whose name is a hash, so that no Param is ever a part of a command."""
    profile = load_profile("p")
    for value in (word, f"/data/{word}"):
        try:
            dag.params.get_param(name).resolve(value=value)
            check_known({name: value})
            if name == "stop_after":
                window_end(Nightly(), value, "manual", 0.0)
            spec = build_spec(profile, "p", {name: value}, "run-1")
        except ParamValidationError:
            continue
        except ConfigError as e:
            named = e.field
        else:
            named = ""
        if named:
            assert named == name
            continue
        assert name in ("dataset", "output_root"), f"{name} takes {value!r}"
        assert value.startswith("/")
        assert value in (spec.data.path, spec.host.output_root)
        assert c.decode(c.RunSpec, c.encode(spec)) == spec
        assert re.fullmatch(r"[A-Za-z0-9._-]+", spec.data.name), "the data set's name is a part of folder names"


@pytest.mark.parametrize("word", [w for w in WORDS if w], ids=repr)
def test_a_name_that_a_person_gave_the_run(dag: DAG, word: str) -> None:
    """Airflow lets a run have any id: it is in the spec, in no command and no path."""
    profile = load_profile("p")
    assert build_spec(profile, "p", {}, word).run_id == word
    ti: Any = SimpleNamespace(dag_id="d", run_id=word, task_id=f"extract{word}", map_index=0, try_number=1)
    context: Any = {"ti": ti}
    assert re.fullmatch(r"[A-Za-z0-9._-]{1,200}", job_name(context, SPEC_PATH))


@pytest.mark.parametrize("word", [w for w in WORDS if w], ids=repr)
def test_a_profile_s_name(dag: DAG, word: str) -> None:
    with pytest.raises(HsxOperatorError):
        load_profile(f"../{word}")
    with pytest.raises(HsxOperatorError):
        load_profile(word)
