"""A real SSH server, a host folder with every awkward character in its name, and a tiny real model."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

os.environ["AIRFLOW_HOME"] = tempfile.mkdtemp(prefix="hsx-airflow-")
os.environ["AIRFLOW__CORE__LOAD_EXAMPLES"] = "False"

from dag_story import PROFILES
from stands import NOTIFIER_PATH, PLATFORM, sglang_python, write_samples
from stands import tiny_model as make_tiny_model

from hsx_demo.client import AirflowClient
from hsx_demo.sshd import SshServer, start_sshd
from hsx_demo.stack import Stack
from hsx_host import contract as c
from hsx_operators.bundle import Bundle, make_bundle
from hsx_operators.hook import GpuHostHook

CONN = "hsx_test_host"


def pytest_unconfigure() -> None:
    """Airflow's folder goes with the session."""
    shutil.rmtree(os.environ["AIRFLOW_HOME"], ignore_errors=True)


@pytest.fixture(scope="session")
def host_python() -> str:
    """The Python that has SGLang."""
    return sglang_python()


@pytest.fixture(scope="session")
def bundle() -> Bundle:
    """The program as it is now."""
    return make_bundle()


@pytest.fixture(scope="session")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshServer]:
    """The borrowed host's door."""
    server = start_sshd(tmp_path_factory.mktemp("sshd"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random llama of 8 blocks."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "llama")


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """No scheduler has to be waited for where a test runs a trigger by itself."""
    monkeypatch.setattr("hsx_operators.triggers.SETTLE_S", 0.0)
    monkeypatch.setattr("hsx_operators.sensors.SETTLE_S", 0.0)


@pytest.fixture
def connection(sshd: SshServer, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the Airflow connection, with overrides for what should be wrong with it."""

    def set_connection(**overrides: Any) -> None:
        body = json.loads(sshd.connection(**overrides))
        body["extra"] = {k: v for k, v in body["extra"].items() if v is not None}
        monkeypatch.setenv(f"AIRFLOW_CONN_{CONN.upper()}", json.dumps(body))

    set_connection()
    return set_connection


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """hsx's folder on the host: spaces, quotes and what a shell would act on."""
    return tmp_path / 'a b\'s "home" $(touch HIT) ;x&'


@pytest.fixture
def spec(tmp_path: Path, home: Path, host_python: str, tiny_model: Path) -> c.RunSpec:
    """A small run against no server."""
    data = tmp_path / "data 'set.jsonl"
    rows = [{"input_ids": [5 + i] * (10 + i), "loss_mask": [1] * (10 + i)} for i in range(6)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    server = c.ServerSettings(args=["--model-path", str(tiny_model)], env={}, host="127.0.0.1", port=24999)
    return c.RunSpec(
        run_id="run 1",
        profile="test",
        manager="process",
        host=c.HostSettings(python=host_python, home=str(home), output_root=str(tmp_path / "out put")),
        production=server,
        extraction=replace(server, args=[*server.args, "--disable-radix-cache"]),
        model=c.ModelSettings(path=str(tiny_model)),
        capture=c.CaptureSettings(layers=[1, 4, 6], formats=["speculators_v1"]),
        data=c.DataSettings(path=str(data), name="set", shard_size=4),
        benchmark=c.BenchmarkSettings(enabled=False, loads={}),
        cleanup=c.CleanupSettings(policy="never", reserve_bytes=0),
        lease_ttl_s=60.0,
    )


@pytest.fixture
def hook(connection: Callable[..., None], host_python: str, home: Path, bundle: Bundle) -> Iterator[GpuHostHook]:
    """The hook, with the program shipped."""
    with GpuHostHook(CONN, host_python, str(home)) as made:
        made.ship(bundle)
        yield made


@pytest.fixture
def host(hook: GpuHostHook, spec: c.RunSpec) -> dict[str, Any]:
    """What plan answers about the host."""
    return {
        "ssh_conn_id": CONN,
        "python": hook.python,
        "home": hook.home,
        "bundle": hook.bundle,
        "bundle_dir": hook.bundle_dir,
        "spec_path": hook.put_document(spec),
        "shard_retries": 0,
    }


@pytest.fixture(scope="module")
def stand(tmp_path_factory: pytest.TempPathFactory, host_python: str, tiny_model: Path) -> Iterator[Stack]:
    """A borrowed host with production running, and Airflow beside it."""
    work = tmp_path_factory.mktemp("stand")
    profiles = shutil.copytree(PROFILES, work / "profiles")
    shutil.copy(profiles / "tiny.yaml", profiles / "asks.yaml")
    with Stack(
        work / "s",
        python_host=host_python,
        model=tiny_model,
        dataset=write_samples(work / "chats.jsonl", samples=120),
        profile="tiny",
        extra_env={"HSX_PROFILES": str(profiles), "PYTHONPATH": NOTIFIER_PATH, "HSX_DEMO_PLATFORM": PLATFORM},
    ) as stack:
        yield stack.start()


@pytest.fixture(scope="module")
def client(stand: Stack) -> AirflowClient:
    """The REST API, as the UI uses it."""
    assert stand.airflow is not None
    return stand.airflow.client()
