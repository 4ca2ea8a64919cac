"""What a job's log becomes for the page, and the reasons of failed tries."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped

from hsx_operators import errors, published
from hsx_operators.published import POINTS, PROGRESS, TRIES, Told, reasons_kept, tell, tell_from_trigger


def line(done: int, at: float, total: int = 500) -> str:
    body = {"progress": "extract", "done": done, "total": total, "tokens": done * 10, "bytes": done * 100}
    return json.dumps({**body, "rate": 1.0, "tok_s": 10.0, "eta": 5.0, "at": at})


def test_of_several_progress_lines_a_reader_sees_the_last_and_every_other_line() -> None:
    told = Told("gpu-7", ["extract", "--shard", "3"], shard=3)
    shown = told.hear("\n".join([line(1, 1.0), "row 5 failed", line(2, 2.0), line(3, 3.0), "no json {"]))
    assert shown.splitlines() == ["row 5 failed", line(3, 3.0), "no json {"]
    document = told.document()
    assert (document["host"], document["verb"], document["shard"]) == ("gpu-7", "extract", 3)
    assert (document["done"], document["total"], document["tok_s"], document["eta"]) == (3, 500, 10.0, 5.0)
    assert document["points"] == [[1.0, 1, 10, 100], [2.0, 2, 20, 200], [3.0, 3, 30, 300]]
    assert document["text"] == "no json {"
    assert told.hear("") == ""


def test_a_worker_s_document_goes_on_in_the_trigger() -> None:
    first = Told("gpu-7", ["extract"], shard=3)
    first.hear(line(1, 1.0))
    then = Told("gpu-7", ["job"], kept=json.loads(json.dumps(first.document())))
    then.hear(line(2, 2.0))
    assert then.document()["points"] == [[1.0, 1, 10, 100], [2.0, 2, 20, 200]]
    assert (then.document()["verb"], then.document()["shard"]) == ("extract", 3)
    assert then.document()["since"] == first.document()["since"]


def test_a_shard_that_borrows_the_host_itself_counts_no_soak_as_samples() -> None:
    told = Told("gpu-7", ["extract", "--shard", "3"], shard=3)
    told.hear(line(33, 1.0, total=33))
    soak = json.dumps({"progress": "soak production", "done": 2, "total": 2, "tokens": 0, "bytes": 0, "at": 9.0})
    assert told.hear(soak) == soak  # a reader of the log sees it
    document = told.document()
    assert (document["done"], document["total"], document["points"]) == (33, 33, [[1.0, 33, 330, 3300]])
    start = Told("gpu-7", ["serve", "production"])
    start.hear(soak)
    assert start.document()["total"] == 2


def test_a_long_job_s_course_stays_small_and_keeps_both_ends() -> None:
    told = Told("gpu-7", ["extract"], shard=3)
    for i in range(3000):
        told.hear(line(i, float(i), total=3000))
    points = told.document()["points"]
    assert len(points) <= POINTS
    assert (points[0][0], points[-1][0]) == (0.0, 2999.0)
    assert [p[0] for p in points] == sorted({p[0] for p in points})
    assert len(json.dumps(told.document())) < 4000


def test_a_line_of_an_older_host_program_has_no_place_in_time() -> None:
    told = Told("gpu-7", ["extract"])
    told.hear('{"progress": "extract", "done": 1, "total": 2}')
    assert told.document()["done"] == 1
    assert "points" not in told.document()


def test_tries_live_in_the_store_and_errors_go_on_their_way() -> None:
    store: dict[str, Any] = {}
    context: Any = {
        "ti": SimpleNamespace(try_number=2),
        "task_state_store": SimpleNamespace(get=store.get, set=store.__setitem__),
    }
    for _ in range(3):
        with pytest.raises(errors.HostUnreachable), reasons_kept(context), reasons_kept(context):
            raise errors.HostUnreachable("no answer", field="host", fix="look")
    with pytest.raises(AirflowSkipException), reasons_kept(context):
        raise AirflowSkipException
    with pytest.raises(DownstreamTasksSkipped), reasons_kept(context):
        raise DownstreamTasksSkipped(tasks=["verify"])
    assert [(t["try"], t["error"], t["message"]) for t in store[TRIES]] == [
        (2, "HostUnreachable", "host: no answer (look)")
    ] * 3


def test_worker_and_trigger_publish_under_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[tuple[str, Any, dict[str, Any]]] = []

    async def aset(key: str, value: Any, **where: Any) -> None:
        pushed.append((key, value, where))

    monkeypatch.setattr(published, "XCom", SimpleNamespace(aset=aset))
    ti = SimpleNamespace(
        dag_id="d",
        run_id="r",
        task_id="t",
        map_index=None,
        xcom_push=lambda key, value: pushed.append((key, value, {})),
    )
    told = Told("gpu-7", ["serve"])
    tell({"ti": ti}, told)  # type: ignore[typeddict-item]
    asyncio.run(tell_from_trigger(ti, told))
    asyncio.run(tell_from_trigger(None, told))
    assert [key for key, _, _ in pushed] == [PROGRESS, PROGRESS]
    assert pushed[1][2] == {"dag_id": "d", "run_id": "r", "task_id": "t", "map_index": -1}
