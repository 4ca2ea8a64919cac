"""The last word of a run: red where anything of it failed, and how production stands compared with before."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator, ExceptionRetryPolicy, RetryAction, RetryRule

from hsx_operators.answers import human_bytes
from hsx_operators.errors import HsxOperatorError
from hsx_operators.hosts import TAKE_OVER
from hsx_operators.plan import SKIPPED_BECAUSE
from hsx_operators.window import left_over

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


#: Steps that skip the rest where the window ends too soon to borrow the host.
BEFORE = ("benchmark_before", "acquire")


#: States of a task that is at work, or will be: the verdict waits for all that it judges, so that none should be left.
UNFINISHED = ("scheduled", "queued", "running", "deferred", "up_for_retry", "up_for_reschedule", "restarting")

#: A mapped task of ``extract``: skipped after the end of the window, it is the next run's.
_SHARD = re.compile(r"(^|\.)extract_\d+$")


class RunFailed(HsxOperatorError):
    """A task of the run failed; the message says which, and how production stands."""


class VerdictOperator(BaseOperator):
    """Raises where any task of the run failed, so that a green teardown can't hide it.

    Make it the last teardown: ``VerdictOperator(...).as_teardown(on_failure_fail_dagrun=True)``.

    :param plan_task_id: the task that told the plan, and may skip the rest where it waited until the window had ended.
    :param gate_task_id: the task that may skip the rest on purpose (nothing to do, dry run).
    :param approval_task_id: the task that may skip the rest by a person's rejection.
    :param handoff_task_id: the task that is skipped where the window ended before the data set was whole.
    :param hosts: the hosts of a profile that lists several; each has a group of tasks, and one of ``take_over``.
    """

    ui_color = "#f5dddd"

    def __init__(
        self,
        *,
        gate_task_id: str = "gate",
        approval_task_id: str = "approve_cleanup",
        plan_task_id: str = "plan",
        handoff_task_id: str = "handoff",
        hosts: Sequence[str] = (),
        **kwargs: Any,
    ) -> None:
        kwargs.setdefault("retries", 2)
        kwargs.setdefault("retry_delay", timedelta(seconds=15))
        kwargs.setdefault("retry_policy", ExceptionRetryPolicy([RetryRule(RunFailed, RetryAction.FAIL)]))
        super().__init__(**kwargs)
        self.gate_task_id, self.approval_task_id, self.plan_task_id = gate_task_id, approval_task_id, plan_task_id
        self.handoff_task_id = handoff_task_id
        self.groups = [f"{group}{host}." for group in ("", f"{TAKE_OVER}.") for host in hosts]

    def execute(self, context: Context) -> dict[str, Any]:
        """Judge the states of all other tasks of this run; return the summary, or raise with it."""
        ti = context["ti"]
        states: dict[str, str | None] = ti.get_task_states(dag_id=ti.dag_id, run_ids=[ti.run_id]).get(ti.run_id, {})
        meant = self._skipped_on_purpose(ti)
        idle = tuple(g for g in self.groups if self._reason(ti, *(f"{g}{task}" for task in ("share", *BEFORE))))
        late = left_over(ti.xcom_pull(task_ids="plan", key="run"))
        others = {
            name: state
            for name, state in states.items()
            if name != self.task_id
            and not (state == "skipped" and (name.startswith(idle) or (late and _SHARD.search(name))))
        }
        bad = [*judge(others, meant), *self._slower(ti)]
        lines = self._summary(ti, meant)
        for line in lines:
            self.log.info("%s", line)
        if bad:
            raise RunFailed("\n".join([*bad, *lines]))
        self.log.info("The run is good.")
        return {"verdict": "good", "summary": lines}

    def _slower(self, ti: Any) -> list[str]:
        """A production that is slower than the profile tolerates makes the run red; the data is handed on already."""
        slow = []
        for group in self.groups or [""]:
            after = ti.xcom_pull(task_ids=f"{group}benchmark_after")
            if after and not after["within_tolerance"]:
                slow.append(f"{group}production is slower than it was: {after['text']}")
        return slow

    def _skipped_on_purpose(self, ti: Any) -> str:
        before = () if self.groups else BEFORE
        return self._reason(
            ti, self.plan_task_id, self.gate_task_id, self.approval_task_id, *before, self.handoff_task_id
        )

    @staticmethod
    def _reason(ti: Any, *task_ids: str) -> str:
        found = (ti.xcom_pull(task_ids=task_id, key=SKIPPED_BECAUSE) for task_id in task_ids)
        return next((str(reason) for reason in found if reason), "")

    def _summary(self, ti: Any, meant: str) -> list[str]:
        lines = [meant] if meant else []
        if plan := ti.xcom_pull(task_ids=self.plan_task_id, key="plan"):
            lines.append(
                f"Plan: {plan['todo']:,} samples, {plan['todo_tokens']:,} tokens, {human_bytes(plan['todo_bytes'])} "
                f"to do; {plan['done']:,} were done; {plan['rejected']:,} rejected; {plan['dataset_dir']}"
            )
        for group in self.groups or [""]:
            lines += [f"{group.rstrip('.')}: {line}" if group else line for line in self._host_summary(ti, group)]
        if self.groups and (handed := ti.xcom_pull(task_ids="handoff")):
            lines.append(
                f"The data set is whole and handed on: {handed['samples']:,} samples, {handed['tokens']:,} tokens, "
                f"{human_bytes(handed['bytes'])}"
            )
        return lines

    def _host_summary(self, ti: Any, group: str) -> list[str]:
        lines = []
        if done := ti.xcom_pull(task_ids=f"{group}verify"):
            lines.append(
                f"Data set: {done['samples']:,} samples, {done['tokens']:,} tokens, {human_bytes(done['bytes'])}; "
                f"{done['failed']} failed, {done['proved']} proved by their next token"
            )
        if restored := ti.xcom_pull(task_ids=f"{group}restore"):
            lines.append(
                f"Production is up again on port {restored['port']} (pid {restored['pid']}), "
                + ("SGLang as installed" if restored["pristine"] else "BUT SGLang's files differ from its package")
            )
        if after := ti.xcom_pull(task_ids=f"{group}benchmark_after"):
            lines.append(f"Production against the baseline: {after['text']}")
        return lines


def judge(states: dict[str, str | None], skipped_on_purpose: str) -> list[str]:
    """One line a problem: failed tasks first, then what they kept from running, then skips that nobody wanted.

    :param states: state by task id (mapped tasks with their index), the verdict itself left out.
    :param skipped_on_purpose: why the rest was skipped, or "" where nothing should have been.
    """
    by: dict[str, list[str]] = {}
    for name, state in sorted(states.items(), key=lambda item: _natural(item[0])):
        by.setdefault(str(state), []).append(name)
    lines = []
    if failed := by.get("failed"):
        lines.append(f"Failed: {', '.join(failed)}")
    if blocked := by.get("upstream_failed"):
        lines.append(f"Did not run because of that: {', '.join(blocked)}")
    if unfinished := [name for state in UNFINISHED for name in by.get(state, [])]:
        lines.append(f"Not ended yet: {', '.join(unfinished)}")
    if not skipped_on_purpose and (skipped := by.get("skipped")):
        lines.append(f"Skipped by hand: {', '.join(skipped)}")
    return lines


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]
