"""A copy of the checkout in which Compose runs, laid out as docs/install.md says."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from install_doc import REPO, bash_blocks

from hsx_demo.client import AirflowClient
from hsx_demo.sshd import SshServer
from hsx_demo.stack import CONN_ID, Stack

HERE = Path(__file__).resolve().parent
UP_TIMEOUT_S = 1500.0
AIRFLOW_SERVICES = ("api-server", "scheduler", "dag-processor", "triggerer", "worker")
#: Connection of the profile ``wide``; it comes from the secrets backend.
FILE_CONN_ID = "hsx_file_host"
WIDE_POOL = "hsx_wide"
WIDE_SHARDS = 60


@dataclass
class Deployment:
    """The copy of the checkout in which Compose runs, and the host beside it."""

    checkout: Path
    network: str
    stack: Stack
    port: int

    def compose(self, *words: str, check: bool = True, timeout_s: float = UP_TIMEOUT_S) -> str:
        """Run Compose; its output."""
        files = ["-f", "docker-compose.yaml", "-f", "test.override.yaml"]
        command = [*shlex.split(os.environ["HSX_COMPOSE"]), *files, *words]
        # as from a person's shell: all settings come from .env
        env = {k: v for k, v in os.environ.items() if not k.startswith(("AIRFLOW", "HSX_", "POSTGRES", "REDIS"))}
        done = subprocess.run(
            command, cwd=self.checkout, env=env, capture_output=True, text=True, timeout=timeout_s, check=False
        )
        assert not check or done.returncode == 0, f"{shlex.join(words)}:\n{done.stdout[-3000:]}\n{done.stderr[-6000:]}"
        return done.stdout

    def containers(self, *services: str) -> dict[str, list[dict[str, Any]]]:
        """What Docker knows of each service's containers, ended ones too."""
        found: dict[str, list[dict[str, Any]]] = {}
        for name in self.compose("ps", "--all", "--quiet", *services).split():
            body = json.loads(docker("inspect", name))[0]
            found.setdefault(body["Config"]["Labels"]["com.docker.compose.service"], []).append(body)
        return found

    def exec(self, service: str, script: str, *, check: bool = True) -> str:
        """Run a script in a running container of a service, as the entry point would; its output."""
        return self.compose("exec", "-T", service, "/entrypoint", "bash", "-euc", script, check=check)

    def setting(self, name: str) -> str:
        """One value of .env."""
        found = re.search(rf"^{name}=(.*)$", (self.checkout / ".env").read_text(), flags=re.M)
        assert found, name
        return found[1]

    def client(self) -> AirflowClient:
        """The REST API, logged in as .env says."""
        client = AirflowClient(f"http://127.0.0.1:{self.port}", "admin", self.setting("ADMIN_PASSWORD"))
        client.login()
        return client

    def bundles(self) -> set[str]:
        """The programs that were shipped to the host."""
        return {p.name for p in (self.stack.host_dir / "hsx" / "bundles").iterdir() if not p.name.startswith(".")}


def docker(*words: str) -> str:
    """Run docker; its output."""
    done = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, f"docker {shlex.join(words)}: {done.stderr[-2000:]}"
    return done.stdout.strip()


def wait_until(ready: Callable[[], bool], what: str, timeout_s: float = 900.0) -> None:
    """Poll until something holds; the time limit is for a machine that has stopped, not a measure."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"waited {timeout_s:.0f} s for {what}"
        time.sleep(1.0)


def write_profiles(folder: Path) -> None:
    """``compose``, as the demo's; ``wide``: two samples a shard, a pool of its own, its connection from a backend."""
    folder.mkdir()
    body = yaml.safe_load((REPO / "tests" / "integration" / "profiles" / "tiny.yaml").read_text())
    body["data"]["shard_size"] = 10
    body["tasks"] = {"shard_retries": 0, "lease_ttl_s": 900}
    body["production"]["start_timeout_s"] = 900
    (folder / "compose.yaml").write_text(yaml.safe_dump(body))
    body["host"] |= {"ssh_conn_id": FILE_CONN_ID, "pool": WIDE_POOL}
    body["data"] |= {"path": "${HSX_TEST_WIDE}", "shard_size": 2, "concurrency": 1, "proof_samples": 1}
    body["benchmark"] = {"enabled": False}
    (folder / "wide.yaml").write_text(yaml.safe_dump(body))


def lay_out(made: Deployment) -> None:
    """What a person puts beside docker-compose.yaml: the commands of docs/install.md, then keys, profiles, hosts."""
    secrets, ssh = made.checkout / "secrets", made.stack.ssh
    assert ssh is not None
    subprocess.run(["bash", "-euc", bash_blocks("### Docker Compose")[0]], cwd=made.checkout, check=True, timeout=60)
    shutil.copy(ssh.key_file, secrets / "hsx")
    scan = ["ssh-keyscan", "-p", str(ssh.port), ssh.host]
    (secrets / "known_hosts").write_bytes(subprocess.run(scan, check=True, capture_output=True, timeout=60).stdout)
    body = connection(ssh)
    body["extra_dejson"] = body.pop("extra")  # as the local file backend wants it
    (secrets / "connections.yaml").write_text(yaml.safe_dump({FILE_CONN_ID: body}))
    owner = int(made.setting("AIRFLOW_UID"))
    for file in (secrets, *secrets.iterdir()):
        file.chmod(0o700 if file.is_dir() else 0o400)
        if os.geteuid() == 0:
            os.chown(file, owner, 0)
    for file in (made.stack.work.parent / "profiles").iterdir():
        shutil.copy(file, made.checkout / "profiles")
    lines = {
        **{k: v for k, v in made.stack.env.items() if k.startswith(("HSX_DEMO_", "HSX_TEST_"))},
        "HSX_PROFILE": "compose",
        "HSX_LISTEN": f"127.0.0.1:{made.port}",
        f"AIRFLOW_CONN_{CONN_ID.upper()}": json.dumps(connection(ssh)),
        "AIRFLOW__SECRETS__BACKEND": "airflow.secrets.local_filesystem.LocalFilesystemBackend",
        "AIRFLOW__SECRETS__BACKEND_KWARGS": '{"connections_file_path": "/opt/airflow/secrets/connections.yaml"}',
        "AIRFLOW__CELERY__WORKER_CONCURRENCY": "2",
        # 60 tasks at once: Airflow's own limits are 32 in all and 16 of a DAG
        "AIRFLOW__CORE__PARALLELISM": "64",
        "AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG": "64",
        # two cores for all of it
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "10",
    }
    with (made.checkout / ".env").open("a") as f:
        f.writelines(f"{name}='{value}'\n" for name, value in lines.items())
    services = yaml.safe_load((made.checkout / "docker-compose.yaml").read_text())["services"]
    override: dict[str, Any] = {
        "networks": {"default": {"name": made.network, "external": True}},
        "services": {n: {"build": {"network": "host"}} for n, s in services.items() if "build" in s},
    }
    (made.checkout / "test.override.yaml").write_text(yaml.safe_dump(override))


def connection(ssh: SshServer) -> dict[str, Any]:
    """A connection as docs/install.md has it: the host key is not in it, but in known_hosts."""
    extra = {"key_file": "/opt/airflow/secrets/hsx", "look_for_keys": False}
    return {"conn_type": "ssh", "host": ssh.host, "port": ssh.port, "login": ssh.user, "extra": extra}
