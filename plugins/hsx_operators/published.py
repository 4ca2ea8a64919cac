"""What a task tells the page while it runs: small JSON documents, of which the api-server needs no SSH to read.

Live progress is an XCom: in Airflow 3.3 a trigger may write XComs and nothing else of its task (a task state store has
no message from the triggerer, a TriggerEvent ends the wait, a log is not data). The reasons of failed tries stand in
the task state store instead: XComs are cleared when a try begins, the store lives through retries and clears.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk.exceptions import AirflowSkipException, DownstreamTasksSkipped
from airflow.sdk.execution_time.xcom import XCom

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

#: XCom of every task that runs a verb: which host, which verb, how far.
PROGRESS = "hsx_progress"
#: Key of the task state store: one entry a failed try.
TRIES = "hsx_tries"
#: So many points of a job's course are kept; older ones are thinned out.
POINTS = 48
_TRIES_KEPT, _MESSAGE_CHARS, _TEXT_CHARS = 20, 1000, 300
_FIGURES = ("done", "total", "tokens", "bytes", "rate", "tok_s", "eta")


class Told:
    """What one job has told so far.

    :param host: the host's name: its SSH connection.
    :param verb: the verb and its arguments.
    :param shard: the shard's number, for ``extract``.
    :param kept: what ``document`` gave elsewhere (the worker, before it deferred), to go on from.
    """

    def __init__(
        self, host: str, verb: Sequence[str], shard: int | None = None, kept: Mapping[str, Any] | None = None
    ) -> None:
        now = round(time.time(), 1)
        self._doc: dict[str, Any] = dict(kept) if kept else {"host": host, "verb": verb[0], "since": now, "at": now}
        if shard is not None:
            self._doc["shard"] = shard

    def hear(self, log: str) -> str:
        """Take a piece of the job's log; give what a person should read of it.

        Of several progress lines only the last is given: they come every second, a reader wants one a poll.
        """
        lines, shown = log.splitlines(), []
        for i, line in enumerate(lines):
            body = progress_of(line)
            if body is None:
                shown.append(line)
                self._doc["text"] = line[:_TEXT_CHARS]
                continue
            # a shard that borrows the host itself tells of the servers' soak too, which are no samples
            if "shard" not in self._doc or body["progress"] == self._doc["verb"]:
                self._doc.update({k: body[k] for k in _FIGURES if k in body})
                self._point(body)
            if all(progress_of(later) is None for later in lines[i + 1 :]):
                shown.append(line)
        return "\n".join(shown)

    def say(self, **facts: Any) -> None:
        """Facts that stand in no log: how a server answers."""
        self._doc.update(facts)

    def document(self) -> dict[str, Any]:
        """As of now. Times are unix seconds; ``points`` are ``[time, done, tokens, bytes]`` of this try."""
        return {**self._doc, "at": round(time.time(), 1)}

    def _point(self, body: Mapping[str, Any]) -> None:
        at = body.get("at")
        if not isinstance(at, (int, float)):
            return
        points = [*self._doc.get("points", []), [at, body.get("done", 0), body.get("tokens", 0), body.get("bytes", 0)]]
        if len(points) > POINTS:
            points = [*points[:-1:2], points[-1]]
        self._doc["points"] = points


def progress_of(line: str) -> dict[str, Any] | None:
    """The progress line of a verb, None for any other line."""
    if not line.startswith("{"):
        return None
    try:
        body = json.loads(line)
    except ValueError:
        return None
    return body if isinstance(body, dict) and "progress" in body else None


def tell(context: Context, told: Told) -> None:
    """Publish from a worker."""
    context["ti"].xcom_push(key=PROGRESS, value=told.document())


async def tell_from_trigger(ti: Any, told: Told) -> None:
    """Publish from the triggerer; nothing where a trigger runs by itself.

    :param ti: the trigger's ``task_instance``.
    """
    if ti is not None:
        await XCom.aset(
            PROGRESS,
            told.document(),
            dag_id=ti.dag_id,
            task_id=ti.task_id,
            run_id=ti.run_id,
            map_index=-1 if ti.map_index is None else ti.map_index,
        )


@contextlib.contextmanager
def reasons_kept(context: Context) -> Iterator[None]:
    """Keep why a try fails where the next try, a clear and the page still find it. The error goes on its way."""
    try:
        yield
    except (AirflowSkipException, DownstreamTasksSkipped):
        raise
    except Exception as e:
        if not getattr(e, "hsx_kept", False):  # an inner step has kept it already
            e.hsx_kept = True  # type: ignore[attr-defined]
            store = context["task_state_store"]
            tries: Any = store.get(TRIES)
            one: Any = {
                "try": context["ti"].try_number,
                "at": round(time.time(), 1),
                "error": type(e).__name__,
                "message": str(e)[:_MESSAGE_CHARS],
            }
            store.set(TRIES, [*(tries if isinstance(tries, list) else []), one][-_TRIES_KEPT:])
        raise
