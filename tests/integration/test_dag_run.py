"""The whole DAG on real parts: Airflow's own components, SSH, SGLang with a tiny model; and a server that dies."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from dag_story import RUN_TIMEOUT_S, Run, journal, manifest, production_untouched

from hsx_demo.client import AirflowClient
from hsx_demo.errors import DemoError
from hsx_demo.stack import DAG_ID, TRAINING_DAG_ID, Stack

NIGHT = f"{DAG_ID}__night"

# The tests below are one story, in this order: production is first stopped by the first kill.


@pytest.mark.parametrize(
    ("conf", "named"), [({"profile": "nothing"}, "profile"), ({"shards": "a"}, "shards"), ({"dry_run": "x"}, "dry_run")]
)
def test_the_form_refuses_an_impossible_value(client: AirflowClient, conf: dict[str, Any], named: str) -> None:
    with pytest.raises(DemoError, match=r"HTTP 4\d\d") as said:
        client.trigger(DAG_ID, conf)
    assert named in str(said.value)


@pytest.mark.parametrize(
    ("conf", "says"),
    [
        ({"dataset": "chats.jsonl"}, "dataset = 'chats.jsonl': is not an absolute path"),
        ({"shard": "0"}, "shard: there is no such Param"),
        ({"dataset": "/nowhere/chats.jsonl"}, "/nowhere/chats.jsonl"),
    ],
)
def test_plan_refuses_what_the_form_lets_pass(
    stand: Stack, client: AirflowClient, conf: dict[str, Any], says: str
) -> None:
    run = Run(client, conf)
    assert run.end() == "failed"
    assert says in run.log("plan")
    assert run.tasks()["plan"].try_number == 1  # a retry can't help
    assert "Failed: plan" in run.log("verdict")
    assert production_untouched(stand)


def test_a_dry_run_tells_and_touches_nothing(stand: Stack, client: AirflowClient) -> None:
    run = Run(client, {"dry_run": True, "shards": "0"})
    assert run.end() == "success", run.story()
    said = run.log("gate")
    assert "Dry run: would extract 100 samples in 1 shards" in said
    assert "bytes)" in said
    states = run.states()
    assert {n for n, s in states.items() if s == "success"} == {"plan", "top_up", "disk_check", "gate", "verdict"}
    assert states["extract"] == states["restore"] == "skipped"
    assert production_untouched(stand)
    assert manifest(stand) == []

    page = client.page(dag=DAG_ID, run=run.id)
    assert page["run"]["foretold"]["samples"] == 100
    assert page["run"]["foretold"]["lines"][0].startswith("Would extract 100 samples in 1 shards")
    assert [step["task_id"] for step in page["run"]["steps"]][:2] == ["plan", "top_up"]
    assert page["datasets"] == []


def test_a_run_with_a_deadline_can_be_cleared(client: AirflowClient) -> None:
    """Airflow 3.3's own reference to the queueing of a run answers a clear with 500."""
    client.unpause(NIGHT)
    run = Run(client, {"dry_run": True}, NIGHT)
    assert run.end() == "success", run.story()
    assert client.clear(NIGHT, run.id, ["gate"], only_failed=False) == ["gate"]
    assert run.end() == "success", run.story()
    assert run.tasks()["gate"].try_number == 2


def test_the_page_is_airflow_s_plugin_and_behind_its_login(stand: Stack, client: AirflowClient) -> None:
    assert stand.airflow is not None
    assert client.get("plugins/importErrors")["import_errors"] == []
    [plugin] = [p for p in client.get("plugins")["plugins"] if p["name"] == "hsx"]
    assert [view["name"] for view in plugin["external_views"]] == ["Hidden states"]
    with pytest.raises(DemoError, match="HTTP 401"):
        AirflowClient(stand.airflow.url, "nobody", "").page()
    with pytest.raises(DemoError, match="HTTP 404"):
        client.page(dag="another", run="r")


def test_a_server_killed_in_mid_extraction_is_red_and_production_comes_back_and_a_clear_does_the_rest(
    stand: Stack, client: AirflowClient
) -> None:
    run = Run(client, {"shards": "0"})
    run.until(lambda: len(manifest(stand)) >= 3)
    server = json.loads((stand.host_dir / "hsx" / "state" / "server.json").read_text())
    assert server["mode"] == "extraction"
    os.killpg(server["pid"], signal.SIGKILL)

    assert run.end() == "failed", run.story()
    states = run.states()
    published = len(manifest(stand))
    assert 3 <= published < 100
    assert states["extract.0"] == "failed"
    assert run.tasks()["extract.0"].try_number == 1  # the profile allows a shard no retry
    assert run.tasks()["extract.0"].label.startswith("shard 00000")
    assert states["verify"] == states["handoff"] == "upstream_failed"
    assert states["restore"] == states["production_healthy"] == states["benchmark_after"] == "success", run.story()
    assert states["verdict"] == "failed"
    said = run.log("verdict")
    assert "Failed: extract_0" in said
    assert "Production is up again" in said
    assert "Production against the baseline: " in said
    assert stand.production_healthy()

    began = len(journal(stand))
    client.clear(DAG_ID, run.id, [("extract", 0)], only_failed=True, include_downstream=True)
    assert run.end() == "success", run.story()
    summary = run.xcom("extract", map_index=0)
    assert summary["extracted"] == 100 - published
    assert summary["published"] == summary["samples"] == 100
    page = client.page(dag=DAG_ID, run=run.id)
    assert (page["run"]["totals"]["states"], page["run"]["totals"]["samples"]) == ({"done": 1}, 100)
    assert page["run"]["rates"]["tok_s"]
    assert [f["task_id"] for f in page["run"]["failures"]] == ["extract"]  # the first try stays told
    assert page["run"]["failures"][0]["message"]
    assert (page["hosts"][0]["mode"], page["hosts"][0]["lease"]) == ("production", None)
    assert page["datasets"][0]["samples"] == 100
    assert run.xcom("verify")["samples"] == 100
    assert Path(run.xcom("handoff")["path"]).is_file()
    assert run.tasks()["restore"].try_number == 1  # not run again: the shard borrowed the host and gave it back
    assert "server started" in journal(stand)[began:]
    assert stand.production_healthy()


def test_nothing_to_do_leaves_production_alone(stand: Stack, client: AirflowClient) -> None:
    before = journal(stand)
    run = Run(client, {"shards": "0"})
    assert run.end() == "success", run.story()
    assert "Nothing to do in the shards that were asked for, where 100 of the 120 samples" in run.log("gate")
    assert run.states()["acquire"] == "skipped"
    assert [e for e in journal(stand)[len(before) :] if e != "job started"] == []


def test_a_missed_hand_off_is_made_up_and_starts_the_training(stand: Stack, client: AirflowClient) -> None:
    """The Asset's event carries the hand-off; the profile's trainer here only writes a file where a checkpoint goes."""
    assert stand.output is not None
    (handoff,) = stand.output.glob("tiny-chats-*/handoff.json")
    handoff.unlink()
    client.unpause(TRAINING_DAG_ID)
    before = journal(stand)
    run = Run(client, {"shards": "0"})
    assert run.end() == "success", run.story()
    states = run.states()
    assert "Only the hand-off is missing" in run.log("gate")
    assert (states["handoff"], states["acquire"], states["verify"]) == ("success", "skipped", "skipped")
    assert handoff.is_file()
    assert "server started" not in journal(stand)[len(before) :]

    training = client.wait_for_run(TRAINING_DAG_ID)
    ended = client.watch(TRAINING_DAG_ID, training, timeout_s=RUN_TIMEOUT_S, poll_s=1.0)
    tasks = {t.task_id: t for t in client.tasks(TRAINING_DAG_ID, training)}
    logs = {n: "\n".join(client.log_lines(TRAINING_DAG_ID, training, t)) for n, t in tasks.items()}
    assert ended == "success", {n: log[-2000:] for n, log in logs.items()}
    assert str(handoff) in logs["handoffs"]
    assert "train: 2 of 2 (100 %)" in logs["train"]
    trained = client.xcom(TRAINING_DAG_ID, training, "train", map_index=0)
    assert Path(trained["drafter"], "model.safetensors").read_text() == "learned [1, 4, 6]"
    assert "The profile has no acceptance" in logs["acceptance"]
    assert client.xcom(TRAINING_DAG_ID, training, "acceptance", map_index=0)["drafter"] == trained["drafter"]
