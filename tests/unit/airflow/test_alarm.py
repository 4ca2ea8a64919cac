"""A restore that has failed for good wakes somebody."""

from __future__ import annotations

import logging
import sys
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from hsx_operators.alarm import ALARM_VARIABLE, production_is_down
from hsx_operators.servers import RestoreProductionOperator


def context(host: Any = MappingProxyType({"ssh_conn_id": "gpu-1"})) -> Any:
    told = dict(host) if host is not None else None
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="restore", xcom_pull=lambda task_ids, key: told)
    return {"ti": ti, "exception": RuntimeError("no GPU")}


def test_the_callable_is_called_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    woken: list[str] = []
    module = cast(Any, ModuleType("oncall"))
    module.wake = lambda text, context: woken.append(text)
    monkeypatch.setitem(sys.modules, "oncall", module)
    monkeypatch.setenv(ALARM_VARIABLE, "oncall.wake")
    with caplog.at_level(logging.CRITICAL, "airflow.task.hsx_alarm"):
        production_is_down(context())
    for word in ("gpu-1", "run r", "no GPU", "restore --now"):
        assert word in woken[0]


@pytest.mark.parametrize("path", ["", "no_such_module.wake"])
def test_without_a_callable_the_log_says_so(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    said: list[str] = []
    monkeypatch.setattr("hsx_operators.alarm.log.critical", lambda text, *args: said.append(text % args))
    monkeypatch.setattr("hsx_operators.alarm.log.warning", lambda text, *args: said.append(text % args))
    monkeypatch.setenv(ALARM_VARIABLE, path)
    production_is_down(context())
    assert "PRODUCTION MAY BE DOWN" in said[0]
    assert "nobody is woken" in said[1]


@pytest.mark.parametrize("host", [None, {"problem": "no SSH"}])
def test_a_host_that_was_never_borrowed_wakes_nobody(monkeypatch: pytest.MonkeyPatch, host: Any) -> None:
    said: list[str] = []
    monkeypatch.setattr("hsx_operators.alarm.log.critical", lambda text, *args: said.append(text % args))
    production_is_down(context(host))
    assert said == []


def test_the_restore_raises_the_alarm() -> None:
    assert RestoreProductionOperator(task_id="restore").on_failure_callback[0] == production_is_down
