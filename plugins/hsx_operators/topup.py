"""More samples by production itself, before the host is borrowed; then the plan is made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from hsx_host import contract as c
from hsx_operators.base import run_key
from hsx_operators.hook import hook_of
from hsx_operators.plan import share_out, tell_plan
from hsx_operators.servers import HoldOff

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class TopUpOperator(HoldOff):
    """Lets production answer prompts until the data set has the samples that the profile wants, then plans again.

    Production is up: nothing is borrowed yet; where another run holds the host it is waited for. Off where the profile
    wants no top-up. XComs: ``plan``, ``shards`` and ``shares``, as plan's own; a dry run only says how many samples
    would be made.

    :param hosts: names of the profile's hosts, as for ``PlanOperator``; the one that planned asks its production.
    """

    result_type = c.TopUpResult
    #: Planning reads the data file once: a million samples in a few minutes.
    plan_timeout_s: ClassVar[float] = 3600.0

    def __init__(self, *, hosts: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.hosts = list(hosts)

    def execute(self, context: Context) -> Any:
        """Hand plan's XComs on where there is nothing to make."""
        host = self.host_of(context)
        if host["top_up"]:
            return None if not host["dry_run"] and self.too_late(context) else super().execute(context)
        self.log.info("The profile wants no top-up.")
        self._hand_on(context)
        return None

    def verb(self, context: Context) -> list[str]:
        """``top-up``."""
        return ["top-up", *(["--dry-run"] if self.host_of(context)["dry_run"] else [])]

    def result(self, document: c.TopUpResult, host: dict[str, Any], context: Context) -> Any:
        """Tell what was made; what the plan does not know yet is planned."""
        ti = context["ti"]
        self.log.info("%d of %d samples: %s", document.now, document.wanted, document.text)
        known = ti.xcom_pull(task_ids=self.plan_task_id, key="plan")
        if document.made == known["top_ups"] or host["dry_run"]:
            self._hand_on(context)
            return c.to_dict(document)
        with hook_of(host) as hook:
            plan = hook.run_verb(c.PlanResult, ["plan"], spec_path=host["spec_path"], timeout_s=self.plan_timeout_s)
        tell_plan(plan, ti, self.log)
        if self.hosts:
            runs = {name: ti.xcom_pull(task_ids=self.plan_task_id, key=run_key(name)) for name in self.hosts}
            share_out(plan, runs, ti, self.log)
        return c.to_dict(document)

    def _hand_on(self, context: Context) -> None:
        ti = context["ti"]
        for key in ("plan", "shards", *(["shares"] if self.hosts else [])):
            ti.xcom_push(key=key, value=ti.xcom_pull(task_ids=self.plan_task_id, key=key))
