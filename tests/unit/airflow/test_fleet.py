"""Several hosts in one profile: how the file is read, the DAG that is made from it, and who does which shards."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import DAG, TriggerRule
from airflow.serialization.serialized_objects import DagSerialization
from fleet_profile import body, dag_bag, write

from hsx_operators.errors import ConfigError, HostLeftOut, ProfileError
from hsx_operators.extraction import FAILURES
from hsx_operators.fleet import ReassignOperator, ShareOperator, came_through, unfinished
from hsx_operators.hosts import STEPS as STEPS_OF_DAG
from hsx_operators.hosts import spread
from hsx_operators.plan import SKIPPED_BECAUSE, check_hosts
from hsx_operators.profile import parse_hosts
from hsx_operators.shapes import HostShape, pools, shape
from hsx_operators.verdict import RunFailed, VerdictOperator

STEPS = [
    "share", "benchmark_before", "acquire", "stop_production", "apply_patch", "start_extraction", "extraction_healthy",
    "probe", "cleanup_old_states", "extract", "verify", "restore", "production_healthy", "benchmark_after",
]  # fmt: skip


# ------------------------------------------------------------------------------ the file


def test_each_host_has_its_own_and_shares_the_rest() -> None:
    one, two = parse_hosts(body(), "profile test")
    assert (one.host.name, two.host.name, two.host.ssh_conn_id) == ("gpu1", "gpu2", "hsx_gpu2")
    assert (one.host.pool, two.host.pool) == ("hsx_gpu_host_gpu1", "hsx_gpu_host_gpu2")
    assert (one.production.port, two.production.port) == (30000, 31000)
    assert one.production.args == two.production.args
    assert two.extraction.flags == {"disable-radix-cache": True, "tp-size": 4}
    assert one.data == two.data


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda b: b.update(host=b["hosts"][0]), "hosts: stands beside host"),
        (lambda b: b.update(hosts=[]), "hosts = []: is not a list of hosts"),
        (lambda b: b["hosts"][1].pop("name"), "hosts[1].name = None: is no host's name"),
        (lambda b: b["hosts"][1].update(name="a.b"), "hosts[1].name = 'a.b': is no host's name"),
        (lambda b: b["hosts"][1].update(name="take_over"), "hosts[1].name = 'take_over': is the name of a step"),
        (lambda b: b["hosts"][1].update(name="plan"), "hosts[1].name = 'plan': is the name of a step"),
        (lambda b: b["hosts"][1].update(name="g" * 240), f"hosts[1].name = '{'g' * 240}': is no host's name"),
        (lambda b: b["hosts"][1].update(name="gpu1"), "hosts[1].name = 'gpu1': is there twice"),
        (lambda b: b["hosts"][1].update(home="x"), "hosts[1].home = 'x': is not an absolute path"),
        (lambda b: b["hosts"][1]["production"].update(port=70000), "hosts[1].production.port = 70000: "),
        (lambda b: b["hosts"][1]["production"].update(prot=1), "hosts[1].production.prot = 1: is not a setting (did"),
        (lambda b: b["hosts"][1].update(production=7), "hosts[1].production = 7: "),
        (lambda b: b["hosts"][0].update(pythn="/x"), "hosts[0].pythn = '/x': is not a setting (did you mean python?)"),
    ],
)
def test_a_mistake_is_named_where_it_stands(change: Any, named: str) -> None:
    broken = body()
    change(broken)
    with pytest.raises(ProfileError) as e:
        parse_hosts(broken, "profile test")
    assert any(p.startswith(named) for p in e.value.problems), e.value.problems


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({}, "hosts[1].home = '/opt/hsx': is that of hosts[0], on the same ssh_conn_id"),
        ({"home": "/opt//hsx/"}, "hosts[1].home = '/opt/hsx': is that of hosts[0]"),
        ({"home": "/opt/two", "production": {"port": 30000}}, "hosts[1].production.port = 30000: is that of hosts[0]"),
        ({"home": "/opt/two", "production": {}}, "hosts[1].production.port = 30000: is that of hosts[0]"),
        ({"home": "/opt/two"}, ""),  # two servers of one host
        ({"ssh_conn_id": "other"}, ""),
    ],
)
def test_one_host_under_two_names_is_refused(change: dict[str, Any], named: str) -> None:
    twice = body()
    for entry in twice["hosts"]:
        entry |= {"ssh_conn_id": "one", "home": "/opt/hsx"}
    twice["hosts"][1] |= change
    if not named:
        assert len(parse_hosts(twice, "profile test")) == 2
        return
    with pytest.raises(ProfileError) as e:
        parse_hosts(twice, "profile test")
    assert e.value.problems[0].startswith(named)


def test_no_host_can_be_called_as_a_step_is(dag: DAG) -> None:
    groups = {"gpu1", "gpu2", "take_over"}
    assert {task_id for task_id in dag.task_ids if "." not in task_id} == set(STEPS_OF_DAG)
    assert set(dag.task_group.children) == groups | set(STEPS_OF_DAG)


def test_a_mistake_of_all_hosts_is_told_once() -> None:
    broken = body()
    broken["production"]["start_timeout_s"] = -1
    with pytest.raises(ProfileError) as e:
        parse_hosts(broken, "profile test")
    assert len(e.value.problems) == 1
    assert e.value.problems[0].startswith("production.start_timeout_s = -1")


@pytest.mark.parametrize(
    ("nightly", "named"),
    [
        ({"schedule": "at one"}, "nightly.schedule = 'at one': is not a cron line"),
        ({"schedule": "0 0 31 2 *"}, "nightly.schedule = '0 0 31 2 *': never comes"),
        ({"schedule": "0 1 * * * 30 2020"}, "nightly.schedule = '0 1 * * * 30 2020': never comes"),
        ({"timezone": "Berlin"}, "nightly.timezone = 'Berlin': is not a time zone"),
        ({"timezone": "../etc"}, "nightly.timezone = '../etc': is not a time zone"),
        ({"stop_after": 18000}, "nightly.stop_after = 18000: "),  # YAML reads an unquoted 05:00 as a number
        ({"stop_after": "0\u0665:00"}, "nightly.stop_after = '0\u0665:00': is not a time of day"),
        ({"stop_after": "5 am"}, "nightly.stop_after = '5 am': is not a time of day"),
    ],
)
def test_mistakes_of_the_nights(nightly: dict[str, Any], named: str) -> None:
    with pytest.raises(ProfileError) as e:
        parse_hosts(body(nightly=nightly), "profile test")
    assert e.value.problems[0].startswith(named), e.value.problems


# ------------------------------------------------------------------------------ the DAG


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    monkeypatch.delenv("HSX_PROFILE", raising=False)
    return tmp_path


@pytest.fixture
def dag(folder: Path) -> DAG:
    write(folder, "fleet", body(nightly={"schedule": "0 1 * * *", "timezone": "Europe/Berlin", "stop_after": "05:00"}))
    found: DAG = dag_bag().dags["hsx_extraction__fleet"]
    return found


def test_a_profile_of_several_hosts_has_a_dag_with_a_group_a_host(dag: DAG) -> None:
    groups = ["gpu1.", "gpu2.", "take_over.gpu1.", "take_over.gpu2."]
    around = ["plan", "top_up", "disk_check", "gate", "approve_cleanup", "reassign", "convert", "handoff", "verdict"]
    assert sorted(dag.task_ids) == sorted([*around, *(f"{g}{s}" for g in groups for s in STEPS)])
    assert len(DagSerialization.to_dict(dag)["dag"]["tasks"]) == len(dag.tasks)
    assert dag.params["profile"] == "fleet"
    for group in groups:
        restore = dag.get_task(f"{group}restore")
        assert restore.is_teardown
        assert {f"{group}{s}" for s in ("acquire", "start_extraction", "extract")} < restore.upstream_task_ids
        assert {dag.get_task(f"{group}{s}").pool for s in ("acquire", "extract", "restore", "verify")} == {
            f"hsx_gpu_host_{group.split('.')[-2]}"
        }


def test_one_hosts_trouble_reaches_no_other_group(dag: DAG) -> None:
    mine = {t.task_id for t in dag.get_task("gpu1.acquire").get_flat_relatives(upstream=False)}
    assert not any(name.startswith("gpu2.") for name in mine)
    # "min one success" would skip them where any step before was skipped: an idle host, nothing to take over.
    assert dag.get_task("reassign").trigger_rule == TriggerRule.ALL_DONE
    assert dag.get_task("convert").trigger_rule == dag.get_task("handoff").trigger_rule == TriggerRule.NONE_FAILED
    assert {"gpu1.restore", "gpu2.restore"} < dag.get_task("reassign").upstream_task_ids


def test_the_form_has_the_profiles_of_one_host(dag: DAG) -> None:
    form = dag_bag().dags["hsx_extraction"]
    assert form.params.get_param("profile").schema["enum"] == ["demo", "kimi-k2.5"]
    assert form.schedule is None
    assert "plan" in form.task_ids


def test_a_worker_builds_only_the_dag_of_its_task(dag: DAG, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_DAG_ID", dag.dag_id)
    assert {d for d in dag_bag().dags if d.startswith("hsx_extraction")} == {dag.dag_id}
    monkeypatch.setenv("_AIRFLOW_PARSING_CONTEXT_DAG_ID", "hsx_extraction")
    assert {d for d in dag_bag().dags if d.startswith("hsx_extraction")} == {"hsx_extraction"}


def test_a_broken_profile_breaks_no_other_and_says_so(folder: Path) -> None:
    write(folder, "one", "host: [")
    write(folder, "two", body(nightly={"schedule": "nonsense"}))
    write(folder, "three", body(thresholds={}))  # wrong, but its hosts and nights can be read: it fails in plan
    write(folder, "fine", body())
    dags = dag_bag().dags
    assert set(dags) - {"hsx_training"} == {
        "hsx_extraction",
        *(f"hsx_extraction__{n}" for n in ("one", "two", "three", "fine")),
    }
    for name, says in (("one", "not YAML"), ("two", "nightly.schedule = 'nonsense'")):
        found = dags[f"hsx_extraction__{name}"]
        assert "broken profile" in found.tags
        assert says in str(found.doc_md)
        assert found.schedule is None
    assert "gpu2.extract" in dags["hsx_extraction__three"].task_ids


def test_pools_of_all_profiles(folder: Path) -> None:
    write(folder, "fleet", body())
    assert set(pools()) == {"hsx_gpu_host", "hsx_gpu_host_gpu1", "hsx_gpu_host_gpu2"}
    assert all(p["slots"] == 1 and p["include_deferred"] for p in pools().values())
    assert shape("fleet").hosts == (HostShape("gpu1", "hsx_gpu_host_gpu1"), HostShape("gpu2", "hsx_gpu_host_gpu2"))


def test_a_profile_that_has_changed_since_the_dag_was_read_is_refused() -> None:
    check_hosts("p", ["gpu1"], [])
    check_hosts("p", ["gpu1", "gpu2"], ["gpu1", "gpu2"])
    with pytest.raises(ConfigError, match="trigger hsx_extraction__p"):
        check_hosts("p", ["gpu1", "gpu2"], [])
    with pytest.raises(ConfigError, match="lists the hosts gpu1, gpu3; this DAG was made for gpu1, gpu2"):
        check_hosts("p", ["gpu1", "gpu3"], ["gpu1", "gpu2"])


# ------------------------------------------------------------------------------ who does which shards


def shard(i: int, tokens: int = 100) -> dict[str, Any]:
    return {"id": i, "name": f"shard {i:05d}", "tokens": tokens}


def ids(shares: Any) -> dict[str, list[int]]:
    return {host: [s["id"] for s in share] for host, share in shares.items()}


def test_shards_are_spread_by_their_tokens() -> None:
    sizes = [500, 100, 100, 100, 100, 100]
    assert ids(spread([shard(i, n) for i, n in enumerate(sizes)], ["a", "b"])) == {"a": [0], "b": [1, 2, 3, 4, 5]}
    assert ids(spread([shard(0)], ["a", "b"])) == {"a": [0], "b": []}
    assert ids(spread([], ["a", "b"])) == {"a": [], "b": []}
    many = spread([shard(i, 1000 + i) for i in range(500)], ["a", "b", "c"])
    loads = [sum(s["tokens"] for s in share) for share in many.values()]
    assert sorted(s["id"] for share in many.values() for s in share) == list(range(500))
    assert max(loads) - min(loads) < 1500


class Ti:
    """What the operators ask of a running task instance."""

    dag_id, run_id = "d", "r"

    def __init__(self, states: dict[str, str], xcoms: dict[tuple[Any, ...], Any]) -> None:
        self.states, self.xcoms, self.pushed = states, xcoms, {}

    def get_task_states(self, **_: Any) -> dict[str, dict[str, str]]:
        return {"r": self.states}

    def xcom_pull(self, task_ids: str, key: str = "return_value", map_indexes: int | None = None) -> Any:
        return self.xcoms.get((task_ids, key) if map_indexes is None else (task_ids, key, map_indexes))

    def xcom_push(self, key: str, value: Any) -> None:
        self.pushed[key] = value


def run(name: str) -> dict[str, Any]:
    return {"ssh_conn_id": name, "stop_after": 0.0}


def reassign(
    states: dict[str, str], shares: dict[str, Any], end: float = 0.0, cleared: int = 0, **xcoms: Any
) -> tuple[dict[str, list[int]], str]:
    known: dict[tuple[Any, ...], Any] = {
        ("plan", "run"): {**run("a"), "stop_after": end},
        ("plan", "run_b"): run("b"),
        ("plan", "run_a"): run("a"),
        ("top_up", "shares"): shares,
    }
    known |= {tuple(k.split("/")) if i is None else (*k.split("/"), i): v for k, (i, v) in xcoms.items()}
    ti = Ti(states, known)
    operator = ReassignOperator(task_id="reassign", hosts=["a", "b"])
    context: Any = {"ti": ti, "dag_run": SimpleNamespace(clear_number=cleared)}
    return ids(operator.execute(context)), ti.pushed["run"]["ssh_conn_id"]


SHARES = {"a": [shard(0), shard(2)], "b": [shard(1), shard(3)]}
GOOD = {
    f"{h}.{s}": "success" for h in "ab" for s in ("acquire", "restore", "production_healthy", "extract_0", "extract_1")
}


def test_nothing_is_handed_over_where_all_is_done() -> None:
    assert reassign(GOOD, SHARES) == ({}, "a")


def test_what_a_failed_host_left_goes_to_those_that_came_through() -> None:
    assert reassign({**GOOD, "b.extract_1": "failed"}, SHARES) == ({"a": [3]}, "a")
    # the host that planned fails: the hand-off is made on another one
    assert reassign({**GOOD, "a.acquire": "failed", "a.extract": "upstream_failed", "a.extract_0": "upstream_failed",
                     "a.extract_1": "upstream_failed"}, SHARES) == ({"b": [0, 2]}, "b")  # fmt: skip
    # mapped tasks that never came to be have no state of their own
    gone = {k: v for k, v in GOOD.items() if not k.startswith("a.extract")}
    assert reassign({**gone, "a.probe": "failed", "a.extract": "upstream_failed"}, SHARES) == ({"b": [0, 2]}, "b")


def test_a_host_that_had_nothing_to_do_can_take_over() -> None:
    idle = {k: "skipped" if k.startswith("b.") else v for k, v in GOOD.items()}
    assert reassign({**idle, "a.extract_0": "failed"}, {"a": [shard(0), shard(2)], "b": []}) == ({"b": [0]}, "b")


def test_samples_that_failed_are_not_tried_on_another_host() -> None:
    states = {**GOOD, "b.extract_0": "failed"}
    assert reassign(states, SHARES, **{f"b.extract/{FAILURES}": (0, ["row 7 after 3 tries: no"])}) == ({}, "a")


def test_where_nothing_was_to_do_a_host_is_found_for_a_missed_hand_off() -> None:
    idle = {f"{h}.{s}": "skipped" for h in "ab" for s in ("share", "acquire", "extract", "restore")}
    assert reassign(idle, {"a": [], "b": []}) == ({}, "a")


@pytest.mark.parametrize(("derive", "handed_off"), [(5, True), (0, False)])
def test_a_missed_hand_off_or_format_is_made_up_for_on_several_hosts(
    dag: DAG, monkeypatch: pytest.MonkeyPatch, derive: int, handed_off: bool
) -> None:
    gate: Any = dag.get_task("gate")
    gate.plan = {"todo": 0, "todo_tokens": 0, "todo_bytes": 0, "done": 9, "valid": 9, "dataset_id": "d",
                 "dataset_dir": "/d", "derive": derive, "handed_off": handed_off}  # fmt: skip
    gate.run, gate.shards = {"dry_run": False, "cleanup_policy": "never"}, []
    gate.disk = {
        "text": "",
        "verdict": "fits",
        "old_states": [],
        "needed_bytes": 0,
        "free_bytes": 1,
        "reserve_bytes": 0,
    }
    skipped: set[str] = set()
    monkeypatch.setattr(type(gate), "skip", lambda self, ti, tasks: skipped.update(t.task_id for t in tasks))
    assert gate.execute({"ti": Ti({}, {}), "task": gate}) == []
    kept = {t.task_id for t in gate.get_flat_relatives(upstream=False)} - skipped
    assert {name for name in kept if not dag.get_task(name).is_teardown} == {"reassign", "convert", "handoff"}


def test_where_nothing_was_planned_nothing_fails_but_the_plan(dag: DAG) -> None:
    reassign: Any = dag.get_task("reassign")
    assert reassign.template_fields == ()  # an XCom that is not there would fail it when it is rendered
    assert reassign.execute({"ti": Ti({"plan": "failed", "top_up": "upstream_failed"}, {})}) == {}
    # reassign ends well, so that it alone would let the hand-off of an unplanned run begin
    assert "approve_cleanup" in dag.get_task("convert").upstream_task_ids


def test_what_the_window_left_is_not_handed_over_when_a_shard_is_cleared_by_day() -> None:
    states = {**GOOD, "b.extract_0": "failed", "b.extract_1": "skipped", "a.extract_1": "skipped"}
    assert reassign(states, SHARES, end=1.0, cleared=1) == ({"a": [1]}, "a")
    late = {k: v for k, v in GOOD.items() if not k.startswith("b.extract")} | {"b.extract": "skipped"}
    assert reassign(late, SHARES, end=1.0, cleared=1) == ({}, "a")  # the host was never borrowed


def test_where_no_host_came_through_nothing_is_handed_over() -> None:
    assert reassign({**GOOD, "a.restore": "failed", "b.extract_1": "failed"}, SHARES)[0] == {}


def test_after_the_window_nothing_is_handed_over() -> None:
    assert reassign({**GOOD, "b.extract_1": "failed"}, SHARES, end=1.0)[0] == {}


def test_states_of_one_host() -> None:
    assert came_through("a", {"a.x": "success", "b.x": "failed"})
    assert not came_through("a", {"a.x": "upstream_failed"})
    assert not came_through("a", {"ab.x": "success"})  # nothing known of it
    assert [i for i, _ in unfinished("a", SHARES["a"], {"a.extract_0": "success", "a.extract_1": "removed"})] == [1]


def test_a_host_that_the_plan_left_out_fails_with_the_reason() -> None:
    ti = Ti({}, {("plan", "run_b"): {"problem": "no answer over SSH"}})
    with pytest.raises(HostLeftOut, match="no answer over SSH"):
        ShareOperator(task_id="b.share", on="b", shares={"a": []}).execute({"ti": ti})  # type: ignore[typeddict-item]


# ------------------------------------------------------------------------------ the last word


def verdict(states: dict[str, str], xcoms: dict[tuple[Any, ...], Any]) -> list[str]:
    ti = Ti(states, xcoms)
    operator = VerdictOperator(task_id="verdict", hosts=["a", "b"])
    summary: list[str] = operator.execute({"ti": ti})["summary"]  # type: ignore[typeddict-item]
    return summary


HANDED = {"samples": 120, "tokens": 9000, "bytes": 1 << 20}
IDLE = {(f"take_over.{h}.share", SKIPPED_BECAUSE): "nothing to do" for h in "ab"}
QUIET = {f"take_over.{h}.{s}": "skipped" for h in "ab" for s in ("acquire", "extract", "restore")}


def test_groups_that_had_nothing_to_do_are_no_problem() -> None:
    said = verdict({**GOOD, **QUIET, "handoff": "success"}, {**IDLE, ("handoff", "return_value"): HANDED})
    assert said == ["The data set is whole and handed on: 120 samples, 9,000 tokens, 1.0 MiB"]


def test_a_failed_host_is_red_though_the_others_took_over() -> None:
    states = {**GOOD, **QUIET, "b.probe": "failed", "b.extract": "upstream_failed", "handoff": "success"}
    with pytest.raises(RunFailed) as e:
        verdict(states, {**IDLE, ("handoff", "return_value"): HANDED})
    assert "Failed: b.probe" in str(e.value)
    assert "whole and handed on" in str(e.value)


def test_a_skip_that_nobody_wanted_is_red_and_a_window_is_not() -> None:
    states = {**GOOD, **QUIET, "b.extract_0": "skipped"}
    with pytest.raises(RunFailed, match=r"Skipped by hand: b\.extract_0"):
        verdict(states, IDLE)
    assert verdict(states, {**IDLE, ("b.acquire", SKIPPED_BECAUSE): "The window ends"}) == []
    left = {("handoff", SKIPPED_BECAUSE): "The window has ended: 4 samples are left."}
    assert verdict({**GOOD, **QUIET, "handoff": "skipped"}, {**IDLE, **left}) == [left["handoff", SKIPPED_BECAUSE]]
