"""The whole DAG on real parts: Airflow's own components, SSH, SGLang with a tiny model; and what goes wrong."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hsx_demo import processes
from hsx_demo.client import AirflowClient, Task
from hsx_demo.errors import DemoError
from hsx_demo.stack import DAG_ID, TRAINING_DAG_ID, Stack

pytestmark = pytest.mark.xdist_group("dag")

PROFILES = Path(__file__).parent / "profiles"
RUN_TIMEOUT_S = 900.0
OLD_BYTES = 2 << 30


def write_chats(path: Path, seed: int, samples: int = 120) -> Path:
    """Samples of 20 to 399 random tokens."""
    rng = random.Random(seed)
    with path.open("w") as f:
        for _ in range(samples):
            n = rng.randrange(20, 400)
            f.write(json.dumps({"input_ids": [rng.randrange(4, 512) for _ in range(n)], "loss_mask": [1] * n}) + "\n")
    return path


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, host_python: str, tiny_model: Path) -> Iterator[Stack]:
    """A borrowed host with production running, and Airflow beside it."""
    work = tmp_path_factory.mktemp("stand")
    profiles = shutil.copytree(PROFILES, work / "profiles")
    shutil.copy(profiles / "tiny.yaml", profiles / "asks.yaml")
    stack = Stack(
        work / "s",
        python_host=host_python,
        model=tiny_model,
        dataset=write_chats(work / "chats.jsonl", seed=7),
        profile="tiny",
        extra_env={"HSX_PROFILES": str(profiles)},
    )
    try:
        stack.start_host()
        stack.launch_production()
        stack.start_airflow()
        stack.wait_production()
        yield stack
    finally:
        stack.stop()


@pytest.fixture(scope="module")
def client(stand: Stack) -> AirflowClient:
    """The REST API, as the UI uses it."""
    assert stand.airflow is not None
    return stand.airflow.client()


class Run:
    """One run of the DAG and what is asked of it."""

    def __init__(self, client: AirflowClient, conf: dict[str, Any]) -> None:
        self.client = client
        self.id = client.trigger(DAG_ID, conf)

    def end(self) -> str:
        return self.client.watch(DAG_ID, self.id, timeout_s=RUN_TIMEOUT_S, poll_s=1.0)

    def tasks(self) -> dict[str, Task]:
        return {
            t.task_id if t.map_index < 0 else f"{t.task_id}.{t.map_index}": t
            for t in self.client.tasks(DAG_ID, self.id)
        }

    def states(self) -> dict[str, str]:
        return {name: t.state for name, t in self.tasks().items()}

    def log(self, name: str) -> str:
        return "\n".join(self.client.log_lines(DAG_ID, self.id, self.tasks()[name]))

    def xcom(self, task_id: str, map_index: int = -1) -> Any:
        return self.client.xcom(DAG_ID, self.id, task_id, map_index=map_index)

    def wait_published(self, stand: Stack, count: int, dataset: str) -> None:
        """Until ``count`` samples of a data set are published and the run still goes on."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while len(manifest(stand, dataset)) < count:
            assert self.client.run_state(DAG_ID, self.id) in ("queued", "running"), self.story()
            assert time.monotonic() < deadline
            time.sleep(0.02)

    def wait_state(self, task_id: str, state: str) -> None:
        """Until a task stands in ``state`` and the run still goes on."""
        deadline = time.monotonic() + RUN_TIMEOUT_S
        while self.states().get(task_id) != state:
            assert self.client.run_state(DAG_ID, self.id) in ("queued", "running"), self.story()
            assert time.monotonic() < deadline
            time.sleep(0.5)

    def answer(self, task_id: str, choice: str) -> None:
        """Answer as a person: not within the seconds in which the scheduler still learns that the task's worker ended.

        It takes a task for lost that is scheduled again before (as with a trigger: hsx_operators.triggers.SETTLE_S).
        """
        time.sleep(8.0)
        self.client.answer(DAG_ID, self.id, task_id, choice)

    def story(self) -> str:
        """For an assertion that fails: every state, and the log of what failed."""
        failed = [n for n, t in self.tasks().items() if t.state == "failed"]
        return "\n".join([str(self.states()), *(f"--- {n}\n{self.log(n)[-3000:]}" for n in failed)])


def journal(stand: Stack) -> list[str]:
    file = stand.host_dir / "hsx" / "state" / "journal.jsonl"
    return [json.loads(line)["event"] for line in file.read_text().splitlines()] if file.exists() else []


def production_untouched(stand: Stack) -> bool:
    """The very process that the owner started still serves, and hsx never tried to end it."""
    assert stand.production is not None
    return processes.alive(stand.production) and stand.production_healthy() and "stopping server" not in journal(stand)


def manifest(stand: Stack, dataset: str = "chats") -> list[str]:
    assert stand.output is not None
    files = stand.output.glob(f"tiny-{dataset}-*/shards/*/manifest.jsonl")
    return [line for f in files for line in f.read_text().splitlines()]


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


def test_the_page_is_airflow_s_plugin_and_behind_its_login(stand: Stack, client: AirflowClient) -> None:
    assert stand.airflow is not None
    assert client.get("plugins/importErrors")["import_errors"] == []
    [plugin] = [p for p in client.get("plugins")["plugins"] if p["name"] == "hsx"]
    assert [view["name"] for view in plugin["external_views"]] == ["Hidden states"]
    with pytest.raises(DemoError, match="HTTP 401"):
        AirflowClient(stand.airflow.url, "nobody", "").page()
    with pytest.raises(DemoError, match="HTTP 404"):
        client.page(dag="another", run="r")


def test_old_states_go_only_after_a_person_approved_their_list(
    stand: Stack, client: AirflowClient, tmp_path: Path
) -> None:
    old = stand.host_dir / "old_states" / "vllm_run_1"
    old.mkdir(parents=True)
    with (old / "data_0.pt").open("wb") as f:
        os.posix_fallocate(f.fileno(), 0, OLD_BYTES)  # takes the space without writing it
    space_is_short_by(stand, OLD_BYTES // 2)
    data = write_chats(tmp_path / "few.jsonl", seed=9, samples=4)
    conf = {"profile": "asks", "dataset": str(data), "benchmark": "off"}

    run = Run(client, conf)
    run.wait_state("approve_cleanup", "awaiting_input")
    asked = client.get(f"dags/{DAG_ID}/dagRuns/{run.id}/taskInstances/approve_cleanup/-1/hitlDetails")
    assert str(old) in asked["body"]
    assert "2.0 GiB" in asked["body"]
    run.answer("approve_cleanup", "Reject")
    assert run.end() == "success", run.story()
    assert run.states()["benchmark_before"] == run.states()["cleanup_old_states"] == "skipped"
    assert "was rejected" in run.log("verdict")
    assert (old / "data_0.pt").exists()
    assert production_untouched(stand)

    run = Run(client, conf)
    run.wait_state("approve_cleanup", "awaiting_input")
    run.answer("approve_cleanup", "Approve")
    assert run.end() == "success", run.story()
    cleaned = run.xcom("cleanup_old_states")
    assert cleaned["deleted"] == [str(old)]
    assert cleaned["freed_bytes"] >= OLD_BYTES // 2  # as the file system sees it: others write there meanwhile
    assert not old.exists()
    assert run.xcom("verify")["samples"] == 4
    assert stand.production_healthy()


def space_is_short_by(stand: Stack, wanted: int) -> None:
    """Set the reserve of the profile ``asks`` so that about ``wanted`` bytes are missing on this file system now."""
    assert stand.output is not None
    stand.output.mkdir(exist_ok=True)
    info = os.statvfs(stand.output)
    reserve = info.f_bavail * info.f_frsize + wanted
    text = (PROFILES / "tiny.yaml").read_text()
    text, changed = re.subn(r"^cleanup: .*$", f"cleanup: {{policy: ask, reserve_bytes: {reserve}}}", text, flags=re.M)
    assert changed == 1
    (Path(stand.extra_env["HSX_PROFILES"]) / "asks.yaml").write_text(text)


def test_a_server_killed_in_mid_extraction_is_red_and_production_comes_back_and_a_clear_does_the_rest(
    stand: Stack, client: AirflowClient
) -> None:
    run = Run(client, {"shards": "0"})
    run.wait_published(stand, 3, "chats")
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
    summary = run.xcom("extract", 0)
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
    assert "Nothing to do: all 100 samples" in run.log("gate")
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


def test_a_host_program_killed_is_red_and_production_comes_back_and_a_whole_clear_does_the_rest(
    stand: Stack, client: AirflowClient, tmp_path: Path
) -> None:
    run = Run(client, {"shards": "0", "dataset": str(write_chats(tmp_path / "more.jsonl", seed=8)), "benchmark": "off"})
    run.wait_published(stand, 3, "more")
    jobs = sorted((stand.host_dir / "hsx" / "jobs").glob("extract-*/job.json"), key=lambda f: f.stat().st_mtime)
    os.killpg(json.loads(jobs[-1].read_text())["pid"], signal.SIGKILL)  # the runner leads its session: verb and runner

    assert run.end() == "failed", run.story()
    states, published = run.states(), len(manifest(stand, "more"))
    assert 3 <= published < 100
    assert (states["extract.0"], states["verdict"]) == ("failed", "failed")
    assert (states["restore"], states["production_healthy"]) == ("success", "success"), run.story()
    assert stand.production_healthy()

    client.clear(DAG_ID, run.id, [("extract", 0)], only_failed=False, include_downstream=True)
    assert run.end() == "success", run.story()
    assert run.xcom("extract", 0)["extracted"] == 100 - published
    assert run.tasks()["restore"].try_number == 2  # setups and teardowns come along with such a clear
    assert list(stand.output.glob("tiny-more-*/tmp/*")) == []  # type: ignore[union-attr]
    assert stand.production_healthy()
