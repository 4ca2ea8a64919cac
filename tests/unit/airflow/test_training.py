"""The training DAG, which hand-offs it takes, what a profile's training becomes, and the gate's missed hand-off."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.definitions.taskgroup import MappedTaskGroup

from hsx_host import contract as c
from hsx_operators.errors import ConfigError
from hsx_operators.extraction import TrainingHandoffOperator
from hsx_operators.plan import HANDOFF_MISSED, SKIPPED_BECAUSE, GateOperator
from hsx_operators.profile import ProfileError, load_profile, parse_profile
from hsx_operators.spec import build_spec
from hsx_operators.topup import TopUpOperator
from hsx_operators.training import CheckHandoffOperator, ReadHandoffsOperator, TrainOperator, from_events

REPO = Path(__file__).resolve().parents[3]
TRAINING: dict[str, Any] = {
    "trainer": "speculators",
    "output_root": "/data/drafters",
    "args": ["--epochs", "3"],
    "env": {"CUDA_VISIBLE_DEVICES": "7"},
    "acceptance": {
        "port": 30010, "steps": 4, "prompts": "/data/held_out.jsonl", "draft_flags": ["--mem-fraction-static", "0.5"],
        "flags": {"tp-size": 4}, "env": {"NCCL_ALGO": None},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def dag() -> DAG:
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(dag_folder=str(REPO / "dags"))
    assert bag.import_errors == {}
    found: DAG = bag.dags["hsx_training"]
    return found


def profile_with(training: dict[str, Any] | None = None, **room: Any) -> Any:
    body = load_profile("kimi-k2.5").model_dump()
    body["data"] |= room
    return parse_profile(body | {"training": training}, "test")


class Ti:
    """XComs by task and key."""

    def __init__(self, **xcoms: Any) -> None:
        self.xcoms, self.pushed = xcoms, dict[str, Any]()
        self.task_id = "x"

    def xcom_pull(self, task_ids: str, key: str = "return_value") -> Any:
        return self.xcoms.get(f"{task_ids}.{key}")

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


# ------------------------------------------------------------------------------ the DAG


@pytest.mark.parametrize("name", ["2026", "1e5", "None", "[1, 2]", "chats-1f2e"])
def test_a_mapped_task_s_label_is_a_text_whatever_the_data_set_is_called(dag: DAG, name: str) -> None:
    """Airflow renders it as it renders fields: natively, where a text that looks like a number becomes one."""
    for task_id, field in (("check_handoff", "handoff"), ("train", "run"), ("acceptance", "run")):
        task: Any = dag.get_task(task_id)
        template = dag.get_template_env().from_string(task.map_index_template)
        for said in ({"dataset_id": name, "profile": "p"}, {"dataset_id": "", "profile": name}):
            if said["dataset_id"] or field == "handoff":
                assert template.render(task=SimpleNamespace(**{field: said})) == f"data set {name}"


def test_it_is_started_by_the_asset_and_serializes(dag: DAG) -> None:
    from airflow.serialization.serialized_objects import DagSerialization

    assert len(DagSerialization.to_dict(dag)["dag"]["tasks"]) == 4
    assert "hsx_hidden_states" in str(dag.timetable.asset_condition)
    assert dag.max_active_runs == 1
    assert [t.task_id for t in dag.topological_sort()] == ["handoffs", "check_handoff", "train", "acceptance"]
    for name in ("check_handoff", "train", "acceptance"):
        task = dag.get_task(name)
        # one group a data set: a check that fails keeps no other data set from its training
        assert isinstance(task.task_group, MappedTaskGroup)
        assert not isinstance(task, MappedOperator)
        assert task.retries == 3
        assert task.pool == "default_pool", "a training must not keep the extraction's slot"
    assert [o.name for o in dag.get_task("acceptance").outlets] == ["hsx_drafter"]


def event(dataset: str, number: int) -> dict[str, Any]:
    return {"profile": "p", "dataset_id": dataset, "path": f"/{dataset}/{number}", "manifest_sha256": str(number)}


def test_events_of_one_data_set_are_one_training_on_the_newest() -> None:
    found = from_events([event("a", 1), event("b", 2), event("a", 3), {}, "made by hand"])  # type: ignore[list-item]
    assert [(f["dataset_id"], f["handoff"], f["manifest"]) for f in found] == [("b", "/b/2", "2"), ("a", "/a/3", "3")]


def test_a_run_by_hand_takes_its_params(monkeypatch: pytest.MonkeyPatch) -> None:
    task = ReadHandoffsOperator(task_id="handoffs")
    run = type("Run", (), {"conf": {}})()
    monkeypatch.setattr("hsx_operators.training.load_profile", lambda name: profile_with(TRAINING))
    context: Any = {"params": {"profile": "own", "handoff": "/h.json"}, "dag_run": run}
    assert task.execute(context) == [{"profile": "own", "handoff": "/h.json", "manifest": "", "dataset_id": ""}]
    run.conf = {"handof": "/h.json"}
    with pytest.raises(ConfigError, match="no such Param"):
        task.execute(context)
    run.conf = {}
    monkeypatch.setattr("hsx_operators.training.load_profile", lambda name: profile_with())
    with pytest.raises(ConfigError, match="has no training"):
        task.execute(context)


def test_an_event_of_a_profile_without_training_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    from hsx_operators.extraction import HIDDEN_STATES

    monkeypatch.setattr("hsx_operators.training.load_profile", lambda name: profile_with())
    events = [type("Event", (), {"extra": event("a", 1)})()]
    context: Any = {
        "params": {}, "dag_run": type("Run", (), {"conf": {}})(), "triggering_asset_events": {HIDDEN_STATES: events}
    }  # fmt: skip
    assert ReadHandoffsOperator(task_id="handoffs").execute(context) == []


def test_one_profile_that_cannot_be_read_fails_in_its_own_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from hsx_operators.extraction import HIDDEN_STATES

    def load(name: str) -> Any:
        if name == "renamed":
            raise ProfileError("profile", [f"profile = {name!r}: there is no such profile"])
        return profile_with(TRAINING)

    monkeypatch.setattr("hsx_operators.training.load_profile", load)
    extras = [event("a", 1), {**event("b", 2), "profile": "renamed"}]
    events = [type("Event", (), {"extra": extra})() for extra in extras]
    context: Any = {
        "params": {}, "dag_run": type("Run", (), {"conf": {}})(), "triggering_asset_events": {HIDDEN_STATES: events},
        "run_id": "r",
    }  # fmt: skip
    found = ReadHandoffsOperator(task_id="handoffs").execute(context)
    assert [one["dataset_id"] for one in found] == ["a", "b"]
    with pytest.raises(ProfileError, match="'renamed': there is no such profile"):
        CheckHandoffOperator(task_id="check", handoff=found[1]).execute(context)


def test_the_job_goes_to_the_training_host() -> None:
    run = {"handoff": "/h", "manifest": "m", "spec_path": "/s"}
    task = TrainOperator(task_id="train", run=run)
    context: Any = {}
    assert task.host_of(context) == run
    assert task.verb(context) == ["train", "--handoff", "/h", "--manifest", "m"]


# ------------------------------------------------------------------------------ profile and spec


def test_a_training_becomes_settings() -> None:
    spec = build_spec(profile_with(TRAINING), "p", {}, "run")
    found = spec.training
    assert found is not None
    assert found.acceptance is not None
    assert found.command[:2] == ["{python}", "{bundle}/hsx_train/speculators_eagle3.py"]
    assert found.command[-2:] == ["--epochs", "3"]
    assert (found.format, found.python, found.root) == ("speculators_v1", "/opt/sglang/bin/python", "/data/drafters")
    server = found.acceptance.server
    assert (server.host, server.port) == ("127.0.0.1", 30010)
    assert server.args[2:4] == ["--tp-size", "4"]
    assert server.env == {"NCCL_PROTO": "LL"}
    assert (found.acceptance.steps, found.acceptance.draft_flags) == (4, ["--mem-fraction-static", "0.5"])
    assert build_spec(profile_with(), "p", {}, "run").training is None
    assert c.decode(c.RunSpec, c.encode(spec)) == spec


def test_specforge_trains_and_exports() -> None:
    training = {"trainer": "specforge", "output_root": "/d", "python": "/opt/sf/bin/python", "args": ["training.lr=1"]}
    found = build_spec(profile_with(training), "p", {}, "run").training
    assert found is not None
    assert found.format == "specforge"
    assert found.command[:8] == [
        "{python}", "-m", "specforge.cli", "train", "--config", "{specforge_config}", "training.lr=1", "&&",
    ]  # fmt: skip
    assert found.acceptance is None


@pytest.mark.parametrize(
    ("training", "field"),
    [
        ({"trainer": "command", "output_root": "/d"}, "training"),
        ({"trainer": "keras", "output_root": "/d"}, "training.trainer"),
        ({"trainer": "speculators", "output_root": "d"}, "training.output_root"),
        ({"trainer": "speculators"}, "training.output_root"),
    ],
)
def test_a_bad_training_is_named(training: dict[str, Any], field: str) -> None:
    with pytest.raises(ProfileError, match=field):
        profile_with(training)


def test_a_top_up_is_off_by_default_and_needs_prompts() -> None:
    assert build_spec(profile_with(), "p", {}, "run").top_up is None
    with pytest.raises(ProfileError, match=r"samples_wanted needs data\.top_up"):
        profile_with(samples_wanted=15000)
    wanted = profile_with(samples_wanted=15000, top_up={"prompts": "/p.jsonl", "seed": 3, "temperature": 0.9})
    found = build_spec(wanted, "p", {}, "run").top_up
    assert found is not None
    assert (found.samples, found.prompts, found.seed, found.temperature) == (15000, "/p.jsonl", 3, 0.9)


# ------------------------------------------------------------------------------ top-up and the missed hand-off


def test_a_top_up_that_is_off_hands_the_plan_on() -> None:
    ti = Ti(**{"plan.run": {"top_up": False, "dry_run": False}, "plan.plan": {"todo": 1}, "plan.shards": [1]})
    context: Any = {"ti": ti}
    TopUpOperator(task_id="top_up").execute(context)
    assert ti.pushed == {"plan": {"todo": 1}, "shards": [1]}


@pytest.mark.parametrize(
    ("done", "handed_off", "dry_run", "derive", "kept"),
    [
        (9, False, False, 0, True),
        (9, True, False, 0, False),
        (0, False, False, 0, False),
        (9, False, True, 0, False),
        (9, True, False, 3, True),
        (9, True, True, 3, False),
    ],
)
def test_the_gate_keeps_a_missed_hand_off(
    monkeypatch: pytest.MonkeyPatch, done: int, handed_off: bool, dry_run: bool, derive: int, kept: bool
) -> None:
    plan = {"todo": 0, "todo_tokens": 0, "todo_bytes": 0, "done": done, "valid": 9, "dataset_id": "d",
            "dataset_dir": "/d", "derive": derive, "handed_off": handed_off}  # fmt: skip
    disk = {"text": "", "verdict": "fits", "old_states": [], "needed_bytes": 0, "free_bytes": 1, "reserve_bytes": 0}
    with DAG("d"):
        gate = GateOperator(
            task_id="gate", run={"dry_run": dry_run, "cleanup_policy": "never"}, plan=plan, shards=[], disk=disk
        )
        other = TopUpOperator(task_id="other")
        handoff = TrainingHandoffOperator(task_id="handoff")
        gate >> other >> handoff
    ti, skipped = Ti(), list[str]()
    monkeypatch.setattr(gate, "skip", lambda ti, tasks: skipped.extend(t.task_id for t in tasks))
    context: Any = {"ti": ti, "task": gate}
    assert gate.execute(context) == []
    assert sorted(skipped) == (["other"] if kept else ["handoff", "other"])
    assert ti.pushed.get(HANDOFF_MISSED, False) is kept
    assert ("hand-off is missing" in ti.pushed[SKIPPED_BECAUSE]) is (kept and not derive)
    assert ("3 samples to derive" in ti.pushed[SKIPPED_BECAUSE]) is (kept and derive == 3)


def test_a_hand_off_runs_behind_a_verify_or_a_missed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowSkipException

    task = TrainingHandoffOperator(task_id="handoff", behind="verify")
    monkeypatch.setattr(task, "run_verb", lambda context: "made")
    for xcoms in ({"verify.return_value": {"ok": True}}, {f"gate.{HANDOFF_MISSED}": True}):
        context: Any = {"ti": Ti(**xcoms)}
        assert task.execute(context) == "made"
    with pytest.raises(AirflowSkipException):
        task.execute({"ti": Ti()})  # type: ignore[typeddict-item]
