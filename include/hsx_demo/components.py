"""Airflow's own components on this machine: SQLite, the local executor, loopback only, everything in one folder."""

from __future__ import annotations

import base64
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hsx_demo.client import AirflowClient
from hsx_demo.errors import DemoError
from hsx_demo.processes import Child, alive, start, stop, tail
from hsx_demo.sshd import free_port

REPO = Path(__file__).resolve().parents[2]
COMPONENTS = ("scheduler", "dag-processor", "triggerer", "api-server")
POOL = "hsx_gpu_host"
USER = "admin"
HEALTHY_WITHIN_S = 600.0  # half a minute on idle cores; the rest is for a machine that is busy elsewhere


@dataclass
class Airflow:
    """A running Airflow. ``env`` is what every component (and the ``airflow`` command) needs to be part of it."""

    home: Path
    port: int
    password: str
    env: dict[str, str]
    children: dict[str, Child] = field(default_factory=dict)

    @property
    def url(self) -> str:
        """Where the UI and the API are."""
        return f"http://127.0.0.1:{self.port}"

    def client(self) -> AirflowClient:
        """A client that is logged in."""
        client = AirflowClient(self.url, USER, self.password)
        client.login()
        return client

    def command(self, *words: str) -> str:
        """Run ``airflow WORDS`` to its end; its output."""
        done = subprocess.run(
            [sys.executable, "-m", "airflow", *words],
            env=self.env,
            cwd=self.home,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode != 0:
            raise DemoError(f"airflow {' '.join(words)} failed:\n{(done.stdout + done.stderr)[-3000:]}")
        return done.stdout

    def start(self, component: str) -> None:
        """Start one component; it logs to ``<home>/<component>.log``."""
        command = [sys.executable, "-m", "airflow", component]
        log = self.home / f"{component}.log"
        self.children[component] = start(command, log=log, name=component, env=self.env, cwd=self.home)

    def stop(self, *components: str) -> None:
        """End the named components, all where none is named."""
        named = components or tuple(self.children)
        stop(*(self.children.pop(c) for c in named if c in self.children), grace_s=15.0)

    def wait_healthy(self, dag_id: str) -> None:
        """Wait until every component reports health and the DAG is known; it is unpaused."""
        deadline, missing = time.monotonic() + HEALTHY_WITHIN_S, ["all"]
        client = AirflowClient(self.url, USER, self.password)
        while missing:
            for name, child in self.children.items():
                if not alive(child):
                    raise DemoError(
                        f"Airflow's {name} ended while starting; the end of {child.log}:\n{tail(child.log)}"
                    )
            if time.monotonic() > deadline:
                logs = "\n".join(f"--- {c.log}\n{tail(c.log, 8)}" for c in self.children.values())
                raise DemoError(f"Airflow is not healthy after {HEALTHY_WITHIN_S:.0f} s: {', '.join(missing)}\n{logs}")
            time.sleep(0.5)
            missing = client.unhealthy()
            if not missing:
                client.login()
                if errors := client.import_errors():
                    raise DemoError("a DAG file does not load:\n" + "\n".join(errors))
                missing = [] if client.has_dag(dag_id) else [f"DAG {dag_id}"]
        client.unpause(dag_id)


def new_airflow(home: Path, extra: Mapping[str, str]) -> Airflow:
    """Lay out an Airflow in ``home`` (not there yet), make its database and pool; nothing runs after it.

    :param extra: more environment: connections, the profile's variables, PYTHONPATH.
    """
    home.mkdir(parents=True)
    home.chmod(0o700)  # the login stands there
    password, port = secrets.token_urlsafe(12), free_port()
    passwords = home / "passwords.json"
    passwords.write_text(json.dumps({USER: password}))
    passwords.chmod(0o600)
    airflow = Airflow(home=home, port=port, password=password, env=environment(home, port, passwords, extra))
    airflow.command("db", "migrate")
    airflow.command("pools", "set", POOL, "1", "one server state a host", "--include-deferred")
    return airflow


def environment(home: Path, port: int, passwords: Path, extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of every component. Secrets are new ones, and never on a command line."""
    base = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HSX_"))}
    settings = {
        "CORE__EXECUTOR": "LocalExecutor",
        "CORE__PARALLELISM": "4",  # more at once and SQLite answers "database is locked"
        "CORE__DAGS_FOLDER": str(REPO / "dags"),
        "CORE__PLUGINS_FOLDER": str(REPO / "plugins"),
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__FERNET_KEY": base64.urlsafe_b64encode(secrets.token_bytes(32)).decode(),
        "CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin",
        "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(passwords),
        # a writer waits a minute for the others before it is told "database is locked", instead of five seconds
        "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}?timeout=60",
        "API__HOST": "127.0.0.1",
        "API__PORT": str(port),
        "API__BASE_URL": f"http://127.0.0.1:{port}",
        "API__WORKERS": "1",
        "API__SECRET_KEY": secrets.token_urlsafe(32),
        "API_AUTH__JWT_SECRET": secrets.token_urlsafe(48),
        "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
        "LOGGING__NAMESPACE_LEVELS": "asyncssh=WARNING",  # it logs ten lines a poll
        "LOGGING__WORKER_LOG_SERVER_PORT": str(free_port()),
        "LOGGING__TRIGGER_LOG_SERVER_PORT": str(free_port()),
        "USAGE_DATA_COLLECTION__ENABLED": "False",
    }
    return {
        **base,
        "AIRFLOW_HOME": str(home),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
        "PYTHONUNBUFFERED": "1",
        **{f"AIRFLOW__{k}": v for k, v in settings.items()},
        **extra,
    }
