"""``make test-hosts``: two SSH servers, two servers, one data set; each host is borrowed and given back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from dag_story import Run
from two_hosts import DAG, TwoHosts

from hsx_demo import processes

pytestmark = pytest.mark.xdist_group("hosts")


@pytest.fixture(scope="module")
def hosts(tmp_path_factory: pytest.TempPathFactory, host_python: str, tiny_model: Path) -> Iterator[TwoHosts]:
    """Both hosts, and Airflow."""
    made = TwoHosts(tmp_path_factory.mktemp("hosts"), host_python, tiny_model)
    try:
        yield made.start()
    finally:
        made.stop()


def test_two_hosts_make_one_data_set_and_each_is_given_back(hosts: TwoHosts) -> None:
    assert hosts.a.airflow is not None
    run = Run(hosts.a.airflow.client(), dag_id=DAG)
    assert run.end() == "success", run.story()
    shares = run.xcom("plan", "shares")
    assert sorted(s["id"] for share in shares.values() for s in share) == [0, 1, 2, 3]
    assert [len(share) for share in shares.values()] == [2, 2]
    states = run.states()
    for name, stack in (("a", hosts.a), ("b", hosts.b)):
        done = [run.xcom(f"{name}.extract", map_index=i) for i in range(2)]
        assert [s["shard"] for s in done] == [s["id"] for s in shares[name]]
        assert sum(s["extracted"] for s in done) == run.xcom(f"{name}.verify")["samples"] == 60
        journal = hosts.journal(stack)
        assert journal.count("lease acquired") == journal.count("lease released") == 1
        assert states[f"{name}.restore"] == states[f"{name}.production_healthy"] == "success"
        assert states[f"take_over.{name}.acquire"] == "skipped"
        assert stack.production is not None
        assert not processes.alive(stack.production)  # it was borrowed: another process serves now
        assert stack.production_healthy()
    assert len(hosts.published()) == 120
    assert run.xcom("handoff")["samples"] == 120
    said = run.log("verdict")
    assert "a: Production is up again" in said
    assert "b: Production is up again" in said
    assert "handed on: 120 samples" in said

    again = Run(hosts.a.airflow.client(), dag_id=DAG)
    assert again.end() == "success", again.story()
    assert "Nothing to do: all 120 samples" in again.log("gate")
    assert again.states()["b.acquire"] == again.states()["reassign"] == "skipped"
