"""Figures of a run through Airflow's own stats: StatsD, Datadog or OpenTelemetry, as ``[metrics]`` of its config says.

Tags, where the backend has them: ``profile`` and ``host`` (its SSH connection). Nothing is sent where no backend is on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from airflow.sdk.observability import stats

from hsx_host import contract as c


def shard_done(document: c.ShardSummary, host: Mapping[str, Any]) -> None:
    """Of one call: counters ``hsx.samples``, ``hsx.tokens``, ``hsx.bytes``; gauge ``hsx.rate`` (tokens a second)."""
    tags = _tags(host)
    stats.incr("hsx.samples", document.extracted, tags=tags)
    stats.incr("hsx.tokens", document.new_tokens, tags=tags)
    stats.incr("hsx.bytes", document.new_bytes, tags=tags)
    stats.gauge("hsx.rate", document.tok_s, tags=tags)


def samples_failed(count: int, host: Mapping[str, Any]) -> None:
    """Counter ``hsx.failed_samples``: once a try of a shard."""
    stats.incr("hsx.failed_samples", count, tags=_tags(host))


def given_back(began: float, borrowed: float | None, host: Mapping[str, Any]) -> None:
    """Gauges ``hsx.restore_seconds`` and ``hsx.borrow_seconds`` (from the lease to the end of the restore).

    Not timings: those reach StatsD and OpenTelemetry in milliseconds.

    :param began: when the restore began, unix seconds.
    :param borrowed: when the lease was granted; None where a step borrowed the host by itself.
    """
    now, tags = time.time(), _tags(host)
    stats.gauge("hsx.restore_seconds", now - began, tags=tags)
    if borrowed:
        stats.gauge("hsx.borrow_seconds", now - borrowed, tags=tags)


def _tags(host: Mapping[str, Any]) -> dict[str, str]:
    return {"profile": str(host["profile"]), "host": str(host["ssh_conn_id"])}
