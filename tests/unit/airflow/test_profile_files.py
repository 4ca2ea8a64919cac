"""The DAG file with odd files among the profiles: each costs its own DAG and no other, and is told."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import ParamValidationError
from airflow.serialization.serialized_objects import DagSerialization
from fleet_profile import body, dag_bag, write

from hsx_operators.errors import ProfileError
from hsx_operators.profile import load_profile
from hsx_operators.profile_files import default_profile, list_profiles, remarks
from hsx_operators.shapes import pools, shape
from hsx_operators.unattended import Alerts

FORM = "hsx_extraction"
ALERTS = {"notifier": "a.B", "deadline_hours": 5}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    monkeypatch.delenv("HSX_PROFILE", raising=False)
    write(tmp_path, "fine", body())
    return tmp_path


def single(**changes: Any) -> dict[str, Any]:
    """A profile of one host."""
    one = body(**changes)
    one["host"] = {k: v for k, v in one.pop("hosts")[0].items() if k != "name"}
    return one


@pytest.mark.parametrize("name", [".#kimi", "my host", "k" * 230, "kimi.yaml\u00e9"])
def test_a_file_whose_name_is_no_profile_s_is_left_out(folder: Path, name: str) -> None:
    write(folder, name, body())
    assert name not in list_profiles()
    assert f"{FORM}__fine" in dag_bag().dags
    told = "\n".join(remarks())
    assert ("is no profile's name" in told) == (not name.startswith("."))  # an editor's lock is nobody's profile
    assert told in str(dag_bag().dags[FORM].doc_md)


def test_an_editor_s_lock_is_a_link_to_nowhere(folder: Path) -> None:
    (folder / ".#fine.yaml").symlink_to("me@host.1234:1")
    (folder / "gone.yaml").symlink_to("/nowhere.yaml")
    dags = dag_bag().dags
    assert "there is no such profile" in str(dags[f"{FORM}__gone"].doc_md)
    assert f"{FORM}__fine" in dags


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (b"\xff\xfe", "not YAML"),
        (b"model: {revision: 2024-13-01}", "not YAML: month must be in 1..12"),
        (b"x: " + b"1" * 5000, "not YAML: Exceeds the limit"),
        (b"hosts: &a [*a]", "an alias holds itself"),
        (b"host: &a {b: *a}", "an alias holds itself"),
        (b"[" * 100_000, "not YAML"),
        (b"alerts: {deadline_hours: .inf}", "alerts.deadline_hours = inf"),
        (b"alerts: {deadline_hours: .nan}", "alerts.deadline_hours = nan"),
        (b"alerts: {deadline_hours: 1.0e+12}", "alerts.deadline_hours = 1000000000000.0"),
        (b"hosts: [{name: plan}]", "hosts[0].name = 'plan': is the name of a step"),
    ],
)
def test_a_file_that_cannot_be_read_costs_its_own_dag(folder: Path, text: bytes, named: str) -> None:
    (folder / "odd.yaml").write_bytes(text)
    with pytest.raises(ProfileError, match="odd") as e:
        load_profile("odd")
    dags = dag_bag().dags
    assert "broken profile" in dags[f"{FORM}__odd"].tags
    assert named in str(dags[f"{FORM}__odd"].doc_md)
    assert named.partition(" = ")[0] in str(e.value)
    assert "gpu2.extract" in dags[f"{FORM}__fine"].task_ids
    assert "hsx_gpu_host_gpu1" in pools()
    assert default_profile() != "odd"


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_a_file_of_somebody_else(folder: Path) -> None:
    write(folder, "odd", body())
    (folder / "odd.yaml").chmod(0)
    assert "can't be read" in str(dag_bag().dags[f"{FORM}__odd"].doc_md)


def test_a_dag_that_cannot_be_made_costs_no_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write(folder, "odd", single(nightly={"schedule": "0 1 * * *"}, alerts=ALERTS))

    def broken(profile: str, alerts: Alerts) -> None:
        if alerts.deadline_hours:
            raise OverflowError("too far in the future")

    monkeypatch.setattr("hsx_operators.alerts.deadline", broken)
    with caplog.at_level(logging.ERROR):
        dags = dag_bag().dags
    assert "OverflowError: too far in the future" in str(dags[f"{FORM}__odd"].doc_md)
    assert dags[f"{FORM}__odd"].schedule is None
    assert f"{FORM}__fine" in dags


def test_a_misspelt_usual_profile_is_told_and_nothing_else_runs_instead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSX_PROFILE", "kimi-k25")
    told = "HSX_PROFILE = 'kimi-k25': there is no such profile (did you mean kimi-k2.5?)"
    assert remarks() == [told]
    with pytest.raises(ProfileError, match=r"'kimi-k25': there is no such profile \(known: "):
        load_profile(default_profile())
    dag = dag_bag().dags[FORM]
    assert told in str(dag.doc_md)
    assert DagSerialization.to_dict(dag)
    with pytest.raises(ParamValidationError, match="kimi-k25"):
        dag.params.validate()
    monkeypatch.setenv("HSX_PROFILE", "fine")  # it has a DAG of its own: that is no mistake, and no reason for another
    assert remarks() == []
    with pytest.raises(ParamValidationError, match="fine"):
        dag_bag().dags[FORM].params.validate()
    monkeypatch.delenv("HSX_PROFILE")
    dag_bag().dags[FORM].params.validate()


def test_who_stands_in_the_form_and_who_has_a_dag_of_its_own(folder: Path) -> None:
    write(folder, "pooled", single())
    pooled = single()
    pooled["host"]["pool"] = "gpu9"
    write(folder, "pooled", pooled)
    write(folder, "timed", single(alerts=ALERTS))
    dags = dag_bag().dags
    offered = dags[FORM].params.get_param("profile").schema["enum"]
    assert "pooled" not in offered  # there its tasks would wait in the pool of the others
    assert dags[f"{FORM}__pooled"].get_task("extract").pool == "gpu9"
    assert "timed" in offered
    assert dags[f"{FORM}__timed"].deadline is not None
    assert not shape("demo").own_dag
