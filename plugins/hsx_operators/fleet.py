"""Several hosts in one run: each host's share of the shards, and who takes over what a host has left."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, SkipMixin

from hsx_operators.base import run_of
from hsx_operators.extraction import FAILURES
from hsx_operators.hosts import spread
from hsx_operators.plan import SKIPPED_BECAUSE
from hsx_operators.window import clock_of, end_of, ended, rest_of

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class ShareOperator(BaseOperator, SkipMixin):
    """The shards of one host, over which its ``extract`` is mapped; a host without any is left alone.

    It fails where the plan could not count on the host, so that a person sees it; the other hosts go on.

    :param on: the host's name.
    :param shares: for each host its shards: plan's XCom ``shares``, or what ``reassign`` answers.
    :param plan_task_id: the task that told where the hosts are.
    """

    template_fields = ("shares",)
    inherits_from_skipmixin = True
    ui_color = "#f3e6c8"

    def __init__(self, *, on: str, shares: Any, plan_task_id: str = "plan", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.on, self.shares, self.plan_task_id = on, shares, plan_task_id

    def execute(self, context: Context) -> list[dict[str, Any]]:
        """Skip the rest of this host's group, teardowns too, where it has nothing to do."""
        share, group = list(self.shares.get(self.on, [])), self.task_id.rpartition(".")[0]
        if share or group == self.on:
            run_of(context, self.plan_task_id, self.on)  # raises what is wrong with the host
        if share:
            self.log.info("%s: %s", self.on, ", ".join(str(s["name"]) for s in share))
            return share
        reason = f"{self.on} has nothing to do here: its production is left alone."
        self.log.info("%s", reason)
        context["ti"].xcom_push(key=SKIPPED_BECAUSE, value=reason)
        self.skip(ti=context["ti"], tasks=rest_of(context, group))
        return []


class ReassignOperator(BaseOperator):
    """Hands the shards that a host has left to the hosts that came through; mostly there is nothing to hand over.

    It runs when every host has ended, well or not, and has been given back. A shard whose samples failed is not
    handed over: another host would meet the same samples. XComs: for each host its shards, and ``run``, where the
    hand-off can be made.

    :param hosts: names of the profile's hosts.
    :param shares_task_id: told ``shares``. It may have failed, and a template would then fail this task too.
    """

    ui_color = "#f3e6c8"

    def __init__(
        self, *, hosts: Sequence[str], shares_task_id: str = "top_up", plan_task_id: str = "plan", **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.hosts, self.shares_task_id, self.plan_task_id = list(hosts), shares_task_id, plan_task_id

    def execute(self, context: Context) -> dict[str, list[Mapping[str, Any]]]:
        """Read the states of this run's tasks; spread what is left."""
        ti = context["ti"]
        states: dict[str, str | None] = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id]).get(ti.run_id, {})
        shares: dict[str, list[dict[str, Any]]] | None = ti.xcom_pull(task_ids=self.shares_task_id, key="shares")
        if shares is None:
            self.log.info("Nothing was planned: no host has left anything to the others.")
            return {}
        standing = [h for h in self.hosts if h in shares and came_through(h, states)]
        lead = run_of(context, self.plan_task_id)
        runs = {h: run_of(context, self.plan_task_id, h) for h in standing}
        run = next((r for r in runs.values() if r["ssh_conn_id"] == lead["ssh_conn_id"]), None)
        ti.xcom_push(key="run", value=run or next(iter(runs.values()), lead))
        left = [
            shard
            for host, share in shares.items()
            for i, shard in unfinished(host, share, states)
            if not ti.xcom_pull(task_ids=f"{host}.extract", key=FAILURES, map_indexes=i)
        ]
        if not left:
            self.log.info("No host has left anything to the others.")
            return {}
        names = ", ".join(str(s["name"]) for s in left)
        if ended(context, lead):
            self.log.warning(
                "left for the next run, the window ended at %s: %s", clock_of(end_of(context, lead)), names
            )
            return {}
        if not standing:
            self.log.error("no host came through that could take over: %s", names)
            return {}
        taken = {host: share for host, share in spread(left, standing).items() if share}
        for host, share in taken.items():
            self.log.warning("%s takes over: %s", host, ", ".join(str(s["name"]) for s in share))
        return taken


def came_through(host: str, states: Mapping[str, str | None]) -> bool:
    """Whether no step of a host's group failed; one that had nothing to do came through too."""
    mine = [state for name, state in states.items() if name.startswith(f"{host}.")]
    return bool(mine) and not any(state in ("failed", "upstream_failed") for state in mine)


def unfinished(
    host: str, share: Sequence[dict[str, Any]], states: Mapping[str, str | None]
) -> Iterable[tuple[int, dict[str, Any]]]:
    """The shards of a host, with their map index, whose ``extract`` failed or was never begun.

    Those that were skipped are not meant: the end of the window has left them for the next run, and a person who clears
    one other shard by day does not want them.
    """
    for i, shard in enumerate(share):
        state = states.get(f"{host}.extract_{i}", states.get(f"{host}.extract"))
        if state not in ("success", "skipped"):
            yield i, shard
