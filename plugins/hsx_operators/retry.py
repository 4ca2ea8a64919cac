"""Which failures are tried again, and after how long: one policy maps hsx's errors."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING, Any

from airflow.sdk import ExceptionRetryPolicy, RetryAction, RetryRule
from airflow.sdk.definitions.retry_policy import RetryDecision

from hsx_operators import errors as e
from hsx_operators.published import TRIES

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

NEVER: list[type[BaseException] | str] = [
    e.ConfigError,
    e.HostBadInput,
    e.HostRefused,
    e.HostKeyMismatch,
    e.HostLoginRefused,
    e.WrongHostPython,
    e.HostLeftOut,
    e.HostGarbage,
]

LONGEST_DELAY = timedelta(minutes=5)


def tries_before(context: Context) -> int:
    """How many tries this round has had before this one. ``max_tries`` grows with every clear, which begins a round."""
    ti = context["ti"]
    return _before(int(ti.try_number), int(ti.max_tries), context)


def _before(try_number: int, max_tries: int, context: Context) -> int:
    return int(context["task"].retries or 0) - (max_tries - try_number) - 1


class HostRetryPolicy(ExceptionRetryPolicy):
    """Bad input, refusals and wrong keys fail at once; a busy host and SSH trouble are waited for.

    An error may carry ``allowed_retries`` (the profile's ``tasks.shard_retries``, which nobody knows when the
    DAG is parsed): beyond it the task fails although ``retries`` would allow more. A clear starts the count again.

    :param again: delay after exit 75 (the host is held, a server died).
    :param others: so many failures in a row that are no held host are tried again, whatever ``retries`` says; None
        leaves them to it.
    :param unreachable: delay after the first SSH failure; it doubles with each try, so that few tries outlast an outage
        of minutes.
    """

    def __init__(
        self,
        again: timedelta = timedelta(seconds=60),
        unreachable: timedelta = timedelta(seconds=30),
        others: int | None = None,
    ) -> None:
        self.others = others
        retry = RetryAction.RETRY
        super().__init__(
            rules=[
                RetryRule(exception=NEVER, action=RetryAction.FAIL, reason="a retry can't help"),
                RetryRule(exception=e.HostTryAgain, action=retry, retry_delay=again, reason="the host says: later"),
                RetryRule(exception=e.HostUnreachable, action=retry, retry_delay=unreachable, reason="no SSH"),
                RetryRule(exception=e.RemoteJobDied, action=retry, retry_delay=unreachable, reason="the job died"),
            ]
        )

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        allowed = getattr(exception, "allowed_retries", None)
        used = 0
        if context is not None:
            used = _before(try_number, max_tries, context)
            if allowed is not None and used >= allowed:
                return RetryDecision.fail(reason=f"the profile allows {allowed} retries of this failure")
            held = isinstance(exception, e.HostHeld)
            if self.others is not None and not held and _in_a_row(context, used) > self.others:
                return RetryDecision.fail(reason=f"failed {self.others + 1} times in a row, and not for a held host")
        decision = super().evaluate(exception, try_number, max_tries, context)
        if isinstance(exception, e.HostUnreachable) and decision.retry_delay is not None:
            delay = min(decision.retry_delay * 2 ** min(max(used, 0), 10), LONGEST_DELAY)
            return RetryDecision.retry(delay, decision.reason)
        return decision


def _in_a_row(context: Context, used: int) -> int:
    """How many tries of this round, the last ones in a row, failed for something else than a held host."""
    store = context.get("task_state_store")
    tries: Any = store.get(TRIES) if store is not None else None
    if not isinstance(tries, list) or not tries:
        return used + 1
    count = 0
    for one in reversed(tries):
        if isinstance(one, dict) and one.get("error") == e.HostHeld.__name__:
            break
        count += 1
    return min(count, used + 1)


#: Steps in front of and around the borrowed host.
HOST_RETRIES = HostRetryPolicy()
#: Giving the host back: soon, and often.
RESTORE_RETRIES = HostRetryPolicy(again=timedelta(seconds=15), unreachable=timedelta(seconds=15))
#: Another run may hold the host for hours; all else passes soon or not at all.
ACQUIRE_RETRIES = HostRetryPolicy(again=timedelta(minutes=5), others=4)
