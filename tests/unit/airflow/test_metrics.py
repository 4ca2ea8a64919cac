"""Figures through Airflow's own stats: what is counted, and that a real OpenTelemetry exporter sends it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from airflow.sdk.observability import stats

from hsx_host import contract as c
from hsx_operators import metrics

HOST = {"profile": "p", "ssh_conn_id": "gpu1"}


class Recorder:
    """A backend that keeps what it was given."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def _keep(self, stat: str, value: Any = None, count: Any = None, **more: Any) -> None:
        self.seen[stat] = (value if count is None else count, more.get("tags"))

    incr = gauge = timing = _keep


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    made = Recorder()
    monkeypatch.setattr(sys.modules[stats.incr.__module__], "_backend", made)
    return made


def summary() -> c.ShardSummary:
    return c.ShardSummary(
        3, "shard 00003", 500, 500, 20, 0, 9000, 900, 2.0, 450.0, "", [], new_tokens=900, new_bytes=90
    )


def test_figures_of_a_call_not_of_the_shard(recorder: Recorder) -> None:
    metrics.shard_done(summary(), HOST)
    metrics.samples_failed(2, HOST)
    tags = {"profile": "p", "host": "gpu1"}
    assert recorder.seen == {
        "hsx.samples": (20, tags),
        "hsx.tokens": (900, tags),
        "hsx.bytes": (90, tags),
        "hsx.rate": (450.0, tags),
        "hsx.failed_samples": (2, tags),
    }


def test_times_of_a_borrow(recorder: Recorder) -> None:
    metrics.given_back(time.time() - 5, time.time() - 100, HOST)
    assert 5 <= recorder.seen["hsx.restore_seconds"][0] < 60
    assert 100 <= recorder.seen["hsx.borrow_seconds"][0] < 160
    recorder.seen.clear()
    metrics.given_back(time.time(), None, HOST)
    assert set(recorder.seen) == {"hsx.restore_seconds"}


def test_opentelemetry_sends_them() -> None:
    """As a task's process does it: Airflow's factory, its exporter, its flush at the end."""
    bodies: list[bytes] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            bodies.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    code = """
from airflow.observability.metrics import stats_utils
from airflow.sdk.observability import stats
from hsx_operators import metrics
import test_metrics
stats.initialize(factory=stats_utils.get_stats_factory(), export_legacy_names=False)
metrics.shard_done(test_metrics.summary(), test_metrics.HOST)
metrics.given_back(0.0, 1.0, test_metrics.HOST)
"""
    env = {**os.environ, "AIRFLOW__METRICS__OTEL_ON": "True", "AIRFLOW__METRICS__OTEL_HOST": "127.0.0.1"}
    env |= {"AIRFLOW__METRICS__OTEL_PORT": str(server.server_port), "NO_PROXY": "127.0.0.1"}
    env["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), os.path.dirname(__file__)])
    try:
        subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, timeout=300)
    finally:
        server.shutdown()
        server.server_close()
    sent = b"".join(bodies)
    for name in (b"hsx.tokens", b"hsx.bytes", b"hsx.rate", b"hsx.borrow_seconds", b"hsx.restore_seconds"):
        assert name in sent, name
