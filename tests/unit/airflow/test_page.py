"""The page's data functions: from what tasks published to what a person sees. No database."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hsx_operators.foretold import FORETOLD
from hsx_operators.published import PROGRESS, TRIES
from hsx_page import places
from hsx_page.datasets import datasets_of
from hsx_page.hosts import hosts_of
from hsx_page.reading import RESULT, Handed, Run, Sighting, Task, dependency_order
from hsx_page.shards import courses_of, rates, shards_of, totals
from hsx_page.view import run_view

NOW = 1_000_000.0


def planned(*ids: int, todo: int = 10) -> list[dict[str, Any]]:
    return [{"id": i, "name": f"shard {i:05d}", "todo": todo, "tokens": 100 * todo, "bytes": 1000 * todo} for i in ids]


def extract(index: int, state: str, *, task_id: str = "extract", tries: int = 1, ended: float | None = None) -> Task:
    began = NOW - 100 if state else None
    return Task(task_id, index, "ExtractShardOperator", state, tries, began, ended, f"shard {index:05d}")


def progress(shard: int, done: int, total: int = 10, **more: Any) -> dict[str, Any]:
    return {"host": "gpu-7", "verb": "extract", "shard": shard, "done": done, "total": total, "tokens": done * 90,
            "bytes": done * 900, "tok_s": 45.0, "eta": 12.0, "at": NOW - 2, **more}  # fmt: skip


@pytest.mark.parametrize(
    ("state", "over", "shown"),
    [
        ("success", False, "done"), ("running", False, "running"), ("deferred", False, "running"),
        ("queued", False, "waiting"), ("", False, "waiting"), ("up_for_retry", False, "retrying"),
        ("failed", True, "failed"), ("upstream_failed", True, "not run"), ("skipped", True, "not run"),
        ("", True, "not run"), ("a state of a later Airflow", False, "waiting"),
    ],
)  # fmt: skip
def test_a_shard_stands_as_its_task_does(state: str, over: bool, shown: str) -> None:
    [shard] = shards_of(planned(0), [extract(0, state)], {}, over=over)
    assert shard.state == shown


def test_a_running_shard_counts_what_it_told_and_an_earlier_try_s_samples() -> None:
    told: Any = {
        ("extract", 0, PROGRESS): progress(4, 3),
        ("extract", 1, PROGRESS): progress(5, 1, total=4),  # six were published by the try before
    }
    first, again = shards_of(planned(4, 5), [extract(0, "deferred"), extract(1, "running", tries=2)], told, over=False)
    assert (first.done, first.tokens, first.bytes, first.tok_s, first.eta) == (3, 270, 2700, 45.0, 12.0)
    assert (again.done, again.tokens, again.tries) == (7, 700, 2)
    assert (first.host, first.task_id, first.map_index) == ("gpu-7", "extract", 0)


def test_a_shard_that_the_window_cut_is_not_done() -> None:
    told: Any = {("extract", 0, RESULT): {"shard": 4, "left": 7, "new_tokens": 30, "new_bytes": 300, "tok_s": 1.0}}
    cut, skipped = shards_of(planned(4, 5), [extract(0, "success"), extract(1, "skipped")], told, over=True)
    assert (cut.state, cut.done, cut.tokens, cut.bytes) == ("not run", 3, 30, 300)
    assert "7 samples are left" in cut.reason
    assert (skipped.state, skipped.done) == ("not run", 0)


def test_a_shard_that_another_host_took_over_is_as_there() -> None:
    tasks = [extract(0, "failed", task_id="a.extract"), extract(0, "success", task_id="b.extract")]
    told: Any = {("a.extract", 0, PROGRESS): progress(4, 3), ("b.extract", 0, RESULT): {"shard": 4, "tok_s": 50.0}}
    [shard] = shards_of(planned(4), tasks, told, over=True)
    assert (shard.state, shard.done, shard.task_id) == ("done", 10, "b.extract")


def test_shards_of_several_hosts_are_never_guessed_from_the_map_index() -> None:
    tasks = [extract(0, "failed", task_id="a.extract"), extract(0, "", task_id="b.extract")]
    told: Any = {("a.extract", 0, PROGRESS): progress(5, 3)}
    four, five = shards_of(planned(4, 5), tasks, told, over=False)
    assert (four.state, five.state) == ("waiting", "failed")


def test_totals_rate_and_time_to_go() -> None:
    told: Any = {
        ("extract", 0, PROGRESS): progress(0, 10, points=[[NOW - 20, 0, 0, 0], [NOW - 10, 10, 1000, 10000]]),
        ("extract", 0, RESULT): {"shard": 0, "tok_s": 100.0, "seconds": 10.0, "bytes": 10000},
        ("extract", 1, PROGRESS): progress(1, 5, points=[[NOW - 10, 0, 0, 0], [NOW, 5, 500, 5000]]),
        ("extract", 2, TRIES): [{"try": 1, "at": 1.0, "error": "HostTryAgain", "message": "full"}],
    }
    tasks = [extract(0, "success", ended=NOW - 10), extract(1, "deferred"), extract(2, "failed"), extract(3, "")]
    shards = shards_of(planned(0, 1, 2, 3), tasks, told, over=False)
    courses = courses_of(tasks, told)
    sums = totals(shards, courses, NOW, foretold_tok_s=None)
    assert sums["states"] == {"done": 1, "running": 1, "failed": 1, "waiting": 1}
    assert (sums["samples"], sums["samples_todo"], sums["tokens"], sums["tok_s"]) == (15, 40, 1450, 45.0)
    assert sums["pace_tok_s"] == 75.0
    assert sums["eta_s"] == (550 + 1000) / 75.0  # what failed is not waited for
    assert shards[2].reason == "full"


def test_before_the_first_point_the_measured_rate_foretells() -> None:
    sums = totals(shards_of(planned(0), [extract(0, "queued")], {}, over=False), [], NOW, foretold_tok_s=50.0)
    assert sums["eta_s"] == 20.0
    assert totals(shards_of(planned(0), [], {}, over=False), [], NOW, foretold_tok_s=None)["eta_s"] is None


def test_rates_keep_every_token_however_courses_overlap() -> None:
    courses = [[(0.0, 0, 0), (7.0, 700, 7000), (50.0, 1000, 10000)], [(5.0, 0, 0), (95.0, 9000, 90000)]]
    found = rates(courses)
    assert found is not None
    assert sum(found["tok_s"]) * found["step"] == pytest.approx(10_000, rel=1e-3)
    assert sum(found["bytes_s"]) * found["step"] == pytest.approx(100_000, rel=1e-2)
    assert len(found["tok_s"]) <= 120
    assert found["tok_s"][0] == 100.0
    at_once = {("extract", 0, PROGRESS): progress(0, 1, points=[[1, 0, 0, 0], [1, 1, 10, 100], [2, 2, 20, 200]])}
    assert courses_of([extract(0, "running")], at_once) == [[(1.0, 10, 100), (2.0, 20, 200)]]
    assert rates([]) is None
    assert rates([[(1.0, 0, 0), (1.0, 5, 5)]]) is None


def test_five_hundred_shards_make_a_small_document() -> None:
    points = [[NOW + i, i, i * 100, i * 1000] for i in range(48)]
    told: Any = {("extract", i, PROGRESS): progress(i, 20, 20, points=points) for i in range(500)}
    tasks = [extract(i, "success", ended=NOW) for i in range(500)]
    view = run_view(
        Run("d", "r", "running", "manual", NOW - 500, None),
        tasks,
        {"shards": planned(*range(500), todo=20)},
        told,
        ["extract"],
        NOW,
    )
    assert len(view["shards"]) == 500
    assert len(json.dumps(view)) < 120_000
    assert view["totals"]["samples"] == 10_000
    assert [(s["task_id"], s["count"], s["done"], s["state"]) for s in view["steps"]] == [
        ("extract", 500, 500, "success")
    ]


def test_a_run_that_has_told_nothing_yet_is_shown_empty() -> None:
    view = run_view(Run("d", "r", "queued", "manual", None, None), [], {}, {}, [], NOW)
    assert [view[k] for k in ("shards", "totals", "rates", "failures", "benchmarks")] == [[], None, None, [], []]


def test_a_dry_run_shows_its_answer_and_no_shards() -> None:
    facts = {"run": {"dry_run": True, "profile": "p"}, "shards": planned(0)}
    told: Any = {("gate", -1, FORETOLD): {"lines": ["Would extract"], "tok_s": None}}
    view = run_view(Run("d", "r", "success", "manual", NOW, NOW), [], facts, told, [], NOW)
    assert view["shards"] == []
    assert view["foretold"]["lines"] == ["Would extract"]
    assert view["dry_run"] is True


def test_every_failed_try_has_its_reason_and_one_without_is_told_as_such() -> None:
    told: Any = {("extract", 3, TRIES): [{"try": n, "at": NOW - n, "error": "E", "message": f"m{n}"} for n in (1, 2)]}
    tasks = [extract(3, "success", tries=3), Task("probe", -1, "ProbeOperator", "failed", 1, NOW - 9, NOW - 5)]
    view = run_view(Run("d", "r", "failed", "manual", NOW - 10, NOW), tasks, {}, told, [], NOW)
    assert [(f["task_id"], f["try"], f["message"]) for f in view["failures"]] == [
        ("extract", 1, "m1"), ("extract", 2, "m2"), ("probe", 1, ""),
    ]  # fmt: skip
    assert view["failures"][0]["url"] == "dags/d/runs/r/tasks/extract/mapped/3"


def test_benchmarks_stand_by_host_and_the_last_plan_counts() -> None:
    def bench(task_id: str, when: str, host: str) -> tuple[Task, dict[Any, Any]]:
        result = {"when": when, "loads": {}, "ratios": {}, "within_tolerance": True, "text": when}
        told = {(task_id, -1, RESULT): result, (task_id, -1, PROGRESS): {"host": host}}
        return Task(task_id, -1, "BenchmarkOperator", "success", 1, NOW, NOW), told

    made = [
        bench("a.before", "before", "gpu-1"),
        bench("b.before", "before", "gpu-2"),
        bench("a.after", "after", "gpu-1"),
    ]
    told: Any = {k: v for _, one in made for k, v in one.items()}
    view = run_view(Run("d", "r", "running", "manual", NOW, None), [t for t, _ in made], {}, told, [], NOW)
    assert [sorted(b) for b in view["benchmarks"]] == [["after", "before", "host"], ["before", "host"]]


# ------------------------------------------------------------------------------ hosts


def sight(
    operator: str, told: Any, ended: float | None, state: str = "success", run: str = "r1", text: str = ""
) -> Sighting:
    task = Task(operator, -1, operator, state, 1, (ended or NOW) - 5, ended)
    return Sighting(Run("d", "r1", "running", "manual", 0.0, None), task, told, {"host": "gpu-7", "text": text})


LEASE = {"run_id": "d/r1@3f2a9c1d", "since": NOW - 300, "expires": NOW + 600, "boot_id": ""}
FACTS = {("d", "r1"): {"run": {"ssh_conn_id": "gpu-7", "lease_ttl_s": 900}}}


def test_a_borrowed_host_and_its_lease_renewed_by_the_last_look() -> None:
    seen = [
        sight("AcquireHostOperator", LEASE, NOW - 300),
        sight("StopServerOperator", {"mode": "stopped", "pid": 0, "port": 0, "ready_s": 0.0}, NOW - 250),
        sight("StartServerOperator", {"mode": "extraction", "pid": 7, "port": 30000, "ready_s": 9.0}, NOW - 200),
    ]
    [host] = hosts_of(seen, FACTS, {("d", "r1"): NOW - 3})
    assert (host["name"], host["mode"], host["pid"], host["port"], host["at"]) == (
        "gpu-7",
        "extraction",
        7,
        30000,
        NOW - 200,
    )
    assert (host["lease"]["dag_id"], host["lease"]["run_id"]) == ("d", "r1")  # the link to the run is made of them
    assert (host["lease"]["renewed"], host["lease"]["expires"]) == (NOW - 3, NOW + 897)


def test_a_host_given_back_has_no_lease_and_a_later_run_s_look_is_the_newest() -> None:
    seen = [
        sight("AcquireHostOperator", LEASE, NOW - 300),
        sight("RestoreProductionOperator", {"mode": "production", "pid": 8, "port": 30000, "ready_s": 9.0}, NOW - 100),
        sight("ServerHealthSensor", {"mode": "production", "pid": 8, "healthy": True}, NOW - 90),
    ]
    [host] = hosts_of(seen, FACTS, {})
    assert (host["mode"], host["lease"], host["healthy"], host["healthy_at"]) == ("production", None, True, NOW - 90)


def test_a_shard_that_borrowed_the_host_itself_tells_of_the_production_server_that_it_brought_back() -> None:
    seen = [
        sight("ExtractShardOperator", {"mode": "production", "pid": 9, "port": 30000, "ready_s": 8.0}, NOW - 10),
        sight("AcquireHostOperator", LEASE, NOW - 300),
        sight("RestoreProductionOperator", {"mode": "production", "pid": 8, "port": 30000, "ready_s": 9.0}, NOW - 100),
    ]
    [host] = hosts_of(seen, FACTS, {})
    assert (host["mode"], host["pid"], host["lease"], host["healthy_at"]) == ("production", 9, None, NOW - 10)


def test_a_transition_under_way_and_one_that_failed_are_told() -> None:
    stopped = sight("StopServerOperator", {"mode": "stopped", "pid": 0, "port": 0, "ready_s": 0.0}, NOW - 50)
    under_way = sight("StartServerOperator", None, None, "deferred", text="loading weights")
    assert hosts_of([stopped, under_way], FACTS, {})[0]["changing"] == "loading weights"
    failed = sight("StartServerOperator", None, NOW, "failed")
    assert hosts_of([stopped, failed], FACTS, {})[0]["changing"] == "StartServerOperator failed"
    assert hosts_of([], {}, {}) == []


# ------------------------------------------------------------------------------ data sets


def test_data_sets_are_handed_off_or_being_made_and_each_once() -> None:
    handoff = {"dataset_id": "a", "samples": 5, "tokens": 50, "bytes": 500, "formats": {"speculators_v1": "/x"}}
    handed = [Handed("d", "r2", NOW, handoff), Handed("d", "r1", NOW - 9, {**handoff, "samples": 1})]
    plan = {"dataset_dir": "/x", "done": 3, "todo": 7}
    runs = [Run("d", name, "running", "manual", NOW - 50, None) for name in ("r2", "r3", "r4")]
    facts: Any = {
        ("d", "r2"): {"plan": {**plan, "dataset_id": "a"}, "run": {}},
        ("d", "r3"): {"plan": {**plan, "dataset_id": "b"}, "run": {}},
        ("d", "r4"): {"plan": {**plan, "dataset_id": "c"}, "run": {"dry_run": True}},
    }
    consumers = {("d", "r2"): [{"dag_id": "train", "run_id": "t", "state": "running"}]}
    found = datasets_of(handed, runs, facts, {("d", "r2"): {"proved": 4, "failed": 0}}, consumers)
    assert [(d["dataset_id"], d["handed_off"], d["samples"]) for d in found] == [("a", True, 5), ("b", False, 3)]
    assert (found[0]["proved"], found[0]["consumers"][0]["dag_id"], found[1]["planned"]) == (4, "train", 10)
    shown = {"dag_id": "d", "run_id": "r3", "totals": {"samples": 2, "tokens": 20, "bytes": 200}}
    [_, grows] = datasets_of(handed, runs, facts, {}, {}, shown)
    assert (grows["samples"], grows["planned"], grows["tokens"]) == (5, 10, None)  # the three before were not told
    plan["done"], plan["todo"] = 0, 10
    facts["d", "r3"]["plan"] |= plan
    [_, grows] = datasets_of(handed, runs, facts, {}, {}, shown)
    assert (grows["samples"], grows["tokens"], grows["bytes"]) == (2, 20, 200)
    [_, other] = datasets_of(handed, runs, facts, {}, {}, {**shown, "dag_id": "e"})  # nights of two DAGs share names
    assert (other["samples"], other["tokens"]) == (0, None)


# ------------------------------------------------------------------------------ places


def test_tasks_come_in_the_order_of_their_dependencies() -> None:
    tasks = [
        {"task_id": "c"},
        {"task_id": "a", "downstream_task_ids": ["b"]},
        {"task_id": "b", "downstream_task_ids": ["c"]},
    ]
    assert dependency_order({"dag": {"tasks": [{"__type": "operator", "__var": t} for t in tasks]}}) == ["a", "b", "c"]


def test_links_survive_every_run_id() -> None:
    inner = "/hsx/?dag=d&run=manual__2026-01-01T00%3A00%3A00%2B00%3A00"
    run = "manual__2026-01-01T00:00:00+00:00"
    assert places.page("d", run, "http://af") == f"http://af/plugin/hidden-states{inner}"
    assert places.page("d", run, "http://af/base/") == f"http://af/base/plugin/hidden-states/base{inner}"
    assert places.task("d", "a/b c", "t", 3) == "dags/d/runs/a%2Fb%20c/tasks/t/mapped/3"


def test_every_operator_of_the_dag_has_the_link() -> None:
    from airflow.dag_processing.dagbag import DagBag

    from hsx_page.links import PageLink

    bag = DagBag(dag_folder=str(places.__file__).replace("plugins/hsx_page/places.py", "dags"))
    linked = {cls.__name__ for cls in PageLink.operators}
    extractions = [dag for name, dag in bag.dags.items() if name.startswith("hsx_extraction")]
    assert extractions
    unlinked = {t.task_id for dag in extractions for t in dag.tasks if t.task_type not in linked}
    assert unlinked == set()


def test_vendored_files_are_those_of_the_lock() -> None:
    """``make vendor`` writes them; the sums say that nobody has edited them since."""
    import hashlib
    from importlib.resources import files

    vendor = files("hsx_page") / "static" / "vendor"
    sums = dict(reversed(line.split()) for line in (vendor / "SHA256SUMS").read_text().splitlines())  # type: ignore[misc]
    assert set(sums) == {p.name for p in vendor.iterdir()} - {"SHA256SUMS"}
    for name, digest in sums.items():
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest, name
