"""The whole DAG on real parts, where a person decides what is deleted, and where the host program is killed."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

from dag_story import PROFILES, Run, manifest, production_untouched
from stands import write_samples

from hsx_demo.client import AirflowClient
from hsx_demo.stack import DAG_ID, Stack

OLD_BYTES = 2 << 30
FORMATS = ["speculators_v1", "speculators", "specforge", "modelopt"]

# The tests below are one story, in this order: production is first stopped after the approval.


def test_old_states_go_only_after_a_person_approved_their_list(
    stand: Stack, client: AirflowClient, tmp_path: Path
) -> None:
    old = stand.host_dir / "old_states" / "vllm_run_1"
    old.mkdir(parents=True)
    with (old / "data_0.pt").open("wb") as f:
        os.posix_fallocate(f.fileno(), 0, OLD_BYTES)  # takes the space without writing it
    space_is_short_by(stand, OLD_BYTES // 2)
    data = write_samples(tmp_path / "few.jsonl", seed=9, samples=4)
    conf = {"profile": "asks", "dataset": str(data), "benchmark": "off"}

    run = Run(client, conf)
    run.wait("approve_cleanup", "awaiting_input")
    asked = client.get(f"dags/{DAG_ID}/dagRuns/{run.id}/taskInstances/approve_cleanup/-1/hitlDetails")
    assert str(old) in asked["body"]
    assert "2.0 GiB" in asked["body"]
    run.answer("approve_cleanup", "Reject")
    assert run.end() == "success", run.story()
    assert run.states()["benchmark_before"] == run.states()["cleanup_old_states"] == "skipped"
    assert "was rejected" in run.log("verdict")
    assert (old / "data_0.pt").exists()
    assert production_untouched(stand)

    run = Run(client, conf | {"formats": FORMATS})
    run.wait("approve_cleanup", "awaiting_input")
    run.answer("approve_cleanup", "Approve")
    assert run.end() == "success", run.story()
    cleaned = run.xcom("cleanup_old_states")
    assert cleaned["deleted"] == [str(old)]
    assert cleaned["freed_bytes"] >= OLD_BYTES // 2  # as the file system sees it: others write there meanwhile
    assert not old.exists()
    assert run.xcom("verify")["samples"] == 4
    folders = json.loads(Path(run.xcom("handoff")["path"]).read_text())["formats"]
    assert sorted(folders) == sorted(FORMATS)  # the first one captured, the others derived from it
    assert all(any(Path(folder).rglob("*")) for folder in folders.values())
    assert len(run.xcom("convert")["formats"]) == 3
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


def test_a_host_program_killed_is_red_and_production_comes_back_and_a_whole_clear_does_the_rest(
    stand: Stack, client: AirflowClient, tmp_path: Path
) -> None:
    more = write_samples(tmp_path / "more.jsonl", seed=8, samples=120)
    run = Run(client, {"shards": "0", "dataset": str(more), "benchmark": "off"})
    run.until(lambda: len(manifest(stand, "more")) >= 3)
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
    assert run.xcom("extract", map_index=0)["extracted"] == 100 - published
    assert run.tasks()["restore"].try_number == 2  # setups and teardowns come along with such a clear
    assert list(stand.output.glob("tiny-more-*/tmp/*")) == []  # type: ignore[union-attr]
    assert stand.production_healthy()
