"""Which failures are tried again."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, cast

import pytest
from airflow.sdk import RetryAction

from hsx_host.contract import ErrorDoc
from hsx_operators import errors as e
from hsx_operators.base import HostVerbOperator
from hsx_operators.extraction import VerifyDatasetOperator
from hsx_operators.retry import HostRetryPolicy

DOC = ErrorDoc(kind="again", message="m")
POLICY = HostRetryPolicy(again=timedelta(seconds=7), unreachable=timedelta(seconds=3))


def decide(error: BaseException, *, try_number: int = 1, max_tries: int = 5, retries: int = 5) -> Any:
    context = cast(Any, {"task": SimpleNamespace(retries=retries)})
    return POLICY.evaluate(error, try_number, max_tries, context)


@pytest.mark.parametrize(
    "error",
    [
        e.HostBadInput("v", DOC),
        e.HostRefused("v", DOC),
        e.HostKeyMismatch("m"),
        e.HostLoginRefused("m"),
        e.WrongHostPython("m"),
        e.HostGarbage("m"),
        e.ConfigError("m"),
        e.ProfileError("p", ["x"]),
    ],
)
def test_what_a_retry_cannot_help_fails_at_once(error: Exception) -> None:
    assert decide(error).action is RetryAction.FAIL


@pytest.mark.parametrize(
    ("error", "delay"), [(e.HostTryAgain("v", DOC), 7), (e.HostUnreachable("m"), 3), (e.RemoteJobDied("m"), 3)]
)
def test_trouble_that_passes_is_waited_for(error: Exception, delay: int) -> None:
    decision = decide(error)
    assert decision.action is RetryAction.RETRY
    assert decision.retry_delay == timedelta(seconds=delay)


def test_an_outage_of_minutes_is_outlasted_by_the_tries_of_a_step() -> None:
    policy = HostRetryPolicy()
    retries = HostVerbOperator.default_retries
    context = cast(Any, {"task": SimpleNamespace(retries=retries)})
    delays = [policy.evaluate(e.HostUnreachable("m"), n, retries, context).retry_delay for n in range(1, retries + 1)]
    assert [d.total_seconds() for d in delays if d] == [30, 60, 120, 240]


def test_a_bug_is_left_to_the_task() -> None:
    assert decide(e.HostBug("v", DOC)).action is RetryAction.DEFAULT
    assert decide(ValueError("x")).action is RetryAction.DEFAULT


@pytest.mark.parametrize(
    ("allowed", "try_number", "max_tries", "again"),
    [
        (0, 1, 5, False),  # the demo: a killed server is red at once
        (2, 1, 5, True),
        (2, 2, 5, True),
        (2, 3, 5, False),
        (0, 4, 8, False),  # cleared after try 3: Airflow sets max_tries to 3 + retries
        (2, 4, 8, True),
        (2, 6, 8, False),
        (None, 5, 5, True),
    ],
)
def test_the_profile_bounds_the_retries_of_a_shard(
    allowed: int | None, try_number: int, max_tries: int, again: bool
) -> None:
    for error in (e.HostTryAgain("v", DOC), e.RemoteJobDied("m")):
        error.allowed_retries = allowed
        action = decide(error, try_number=try_number, max_tries=max_tries).action
        assert (action is RetryAction.RETRY) == again


def test_bad_input_fails_whatever_the_profile_allows() -> None:
    error = e.HostBadInput("v", DOC)
    error.allowed_retries = 3
    assert decide(error).action is RetryAction.FAIL


def test_samples_that_are_missing_are_not_verified_again() -> None:
    """Production waits for ``verify``, and no try of it makes a sample."""
    verify = VerifyDatasetOperator(task_id="verify")
    missing = e.HostTryAgain("verify", ErrorDoc("again", "41 are missing", "manifest.jsonl"))
    busy = e.HostTryAgain("verify", ErrorDoc("again", "another process is busy", "lock"))
    assert [verify.allowed_retries(error, {}) for error in (missing, busy)] == [0, None]
    missing.allowed_retries = 0
    assert decide(missing).action is RetryAction.FAIL
