"""One whole stand on one machine: the borrowed host (SSH server, production SGLang) and Airflow beside it.

    with Stack(work, python_host=..., model=..., dataset=...) as stack:
        stack.start()

Runs under the Airflow environment's Python. Everything that it starts, and everything that is started through it, is
ended by ``stop`` (which leaving the ``with`` calls): what was started directly by pid and start time, what hsx started
on "the host" (jobs, the guard, the servers of a restore) by a token in its environment that nothing else on the machine
has.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import urllib.error
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hsx_demo import processes
from hsx_demo.components import COMPONENTS, REPO, Airflow, new_airflow
from hsx_demo.errors import DemoError
from hsx_demo.processes import Child
from hsx_demo.sshd import SshServer, free_port, start_sshd
from hsx_host import envfile, servers
from hsx_host.contract import RunSpec, decode

DAG_ID = "hsx_extraction"
TRAINING_DAG_ID = "hsx_training"
CONN_ID = "hsx_demo_host"
TOKEN = "DEMO_STACK"  # not HSX_...: hsx keeps its own variables away from production


@dataclass
class Stack:
    """Folders and processes of one stand.

    :param work: the stand's folder, of its own.
    :param python_host: the Python that has SGLang.
    :param model: folder of the model.
    :param dataset: pre-tokenised file; may be set later, before Airflow is started.
    :param output: where data sets are written; default ``<work>/output``.
    :param profile: a profile that reads the HSX_DEMO_* variables.
    :param trainer: the Python that has the profile's trainer; only `make demo-training` needs one.
    :param extra_env: more environment for Airflow and for building the spec (such as HSX_PROFILES).
    """

    work: Path
    python_host: str
    model: Path
    dataset: Path | None = None
    output: Path | None = None
    profile: str = "demo"
    extra_env: Mapping[str, str] = field(default_factory=dict)
    trainer: str = ""
    port: int = 0
    acceptance_port: int = 0
    token: str = ""
    ssh: SshServer | None = None
    production: Child | None = None
    airflow: Airflow | None = None

    def __post_init__(self) -> None:
        self.work = self.work.resolve()
        self.work.mkdir(parents=True, exist_ok=True)
        self.output = (self.output or self.work / "output").resolve()
        self.port = self.port or free_port()
        self.acceptance_port = self.acceptance_port or free_port()
        self.token = self.token or uuid.uuid4().hex

    @property
    def host_dir(self) -> Path:
        """What the profile calls HSX_DEMO_HOME; hsx's own home is ``hsx`` below it."""
        return self.work / "host"

    @property
    def env(self) -> dict[str, str]:
        """The variables that the demo profile reads, and the rooms on PYTHONPATH."""
        values = {
            "PYTHONPATH": os.pathsep.join((str(REPO / "plugins"), str(REPO / "include"))),
            "HSX_PROFILE": self.profile,
            "HSX_DEMO_PYTHON": self.python_host,
            "HSX_DEMO_HOME": str(self.host_dir),
            "HSX_DEMO_OUTPUT": str(self.output),
            "HSX_DEMO_MODEL": str(self.model),
            "HSX_DEMO_PORT": str(self.port),
            "HSX_DEMO_ACCEPTANCE_PORT": str(self.acceptance_port),
            **({"HSX_DEMO_TRAINER_PYTHON": self.trainer} if self.trainer else {}),
            "HSX_DEMO_PLATFORM": str(REPO / "include" / "patches" / "hsx_cpu"),
            "HSX_DEMO_DATASET": str(self.dataset or self.work / "no-dataset-yet.jsonl"),
        }
        return {**values, **self.extra_env}

    def __enter__(self) -> Stack:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> Stack:
        """All of it; Airflow is made while production starts."""
        self.start_host()
        self.launch_production()
        self.start_airflow()
        self.wait_production()
        return self

    # ------------------------------------------------------------------ the host

    def start_host(self, *, listen: str = "127.0.0.1") -> SshServer:
        """The SSH server, on an address of this machine, and the folders of the host."""
        for folder in ("hsx", "old_states"):
            (self.host_dir / folder).mkdir(parents=True, exist_ok=True)
        assert self.output is not None
        self.output.mkdir(parents=True, exist_ok=True)
        self.ssh = start_sshd(self.work / "ssh", host=listen, env={TOKEN: self.token})
        self.save()
        return self.ssh

    def spec(self, run_id: str = "demo") -> RunSpec:
        """The frozen plan that a run of the profile would have now."""
        command = [sys.executable, "-m", "hsx_operators.spec", "--profile", self.profile, "--run-id", run_id]
        done = subprocess.run(command, env={**os.environ, **self.env}, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise DemoError(f"profile {self.profile} can't be used:\n{done.stderr.strip()[-2000:]}")
        return decode(RunSpec, done.stdout)

    def launch_production(self) -> Child:
        """Start production as its owner would: the profile's own command and environment, not through hsx."""
        spec = self.spec()
        base = {**servers.clean_base(os.environ), TOKEN: self.token}
        log = self.work / "production.log"
        self.production = processes.start(
            servers.command(spec.host.python, spec.production),
            log=log,
            name="production SGLang",
            env=servers.environment(base, spec.production, envfile.variables(spec.production)),
            cwd=self.work,
        )
        self.save()
        return self.production

    def wait_production(self) -> float:
        """Wait until production is healthy, for as long as its profile gives it; the seconds it took from now."""
        assert self.production is not None
        limit = self.spec().production.start_timeout_s
        return processes.wait_until(self.production_healthy, self.production, what="production SGLang", timeout_s=limit)

    def production_healthy(self) -> bool:
        """Whether the server on production's port answers ``/health``."""
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"{self.production_url}/health", timeout=10) as answer:
                return int(answer.status) == 200
        except (OSError, urllib.error.URLError):
            return False

    @property
    def production_url(self) -> str:
        """Where production answers."""
        return f"http://127.0.0.1:{self.port}"

    # ------------------------------------------------------------------ Airflow

    def start_airflow(self, *, wait: bool = True) -> Airflow:
        """Database, pool, connection, all components; the DAG is unpaused where ``wait``."""
        assert self.ssh is not None, "start_host comes first: the connection names its keys"
        extra = {**self.env, f"AIRFLOW_CONN_{CONN_ID.upper()}": self.ssh.connection()}
        self.airflow = new_airflow(self.work / "airflow", extra)
        for component in COMPONENTS:
            self.airflow.start(component)
        self.save()
        if wait:
            self.airflow.wait_healthy(DAG_ID)
        return self.airflow

    # ------------------------------------------------------------------ the end

    def stop(self) -> list[str]:
        """End everything: Airflow first (nobody polls the host any more), then the host. Names of what had to go."""
        airflow = list(self.airflow.children) if self.airflow else []
        if self.airflow is not None:
            self.airflow.stop()
        ended = [*airflow, *end_host(self.work, self.token, self.ssh.child if self.ssh else None, self.production)]
        self.state_file.unlink(missing_ok=True)
        return ended

    # ------------------------------------------------------------------ what `make down` reads

    @property
    def state_file(self) -> Path:
        """Which processes this stand has, for another process that shall end it."""
        return self.work / "stack.json"

    def save(self) -> None:
        """Write the state file, whole or not at all."""
        body = {
            "token": self.token,
            "ssh": self.ssh.to_json() if self.ssh else None,
            "production": asdict(self.production) if self.production else None,
            "airflow": {k: asdict(v) for k, v in self.airflow.children.items()} if self.airflow else {},
            "url": self.airflow.url if self.airflow else "",
        }
        temporary = self.state_file.with_suffix(".tmp")
        with temporary.open("w") as f:
            json.dump(body, f, indent=1)
            f.flush()
            os.fsync(f.fileno())
        temporary.rename(self.state_file)


def stop_saved(work: Path) -> list[str]:
    """End a stand that another process started in ``work``; names of what was ended."""
    file = work / "stack.json"
    try:
        body = json.loads(file.read_text())
    except FileNotFoundError:
        return []
    children = [Child(**c) for c in body["airflow"].values()]
    ended = [c.name for c in children if processes.alive(c)]
    processes.stop(*children)
    ssh = Child(**body["ssh"]["child"]) if body["ssh"] else None
    ended += end_host(work, body["token"], ssh, Child(**body["production"]) if body["production"] else None)
    file.unlink()
    return ended


def end_host(work: Path, token: str, *started: Child | None) -> list[str]:
    """End the host's side: what was started directly, what carries the token, and the server that hsx has on record."""
    children = [c for c in started if c is not None and processes.alive(c)]
    ended = [c.name for c in children]
    processes.stop(*children)
    ended += end_marked(TOKEN, token)
    with contextlib.suppress(OSError, ValueError, KeyError):
        # a server that hsx started before it had seen production's environment does not carry the token
        record = json.loads((work / "host" / "hsx" / "state" / "server.json").read_text())
        server = Child(f"{record['mode']} SGLang", record["pid"], record["start"], record["log"])
        if processes.alive(server):
            processes.stop(server)
            ended.append(server.name)
    return ended


def end_marked(name: str, value: str) -> list[str]:
    """End every process whose environment was started with ``name=value``, and what hangs below it; names of them."""
    ended: list[str] = []
    for grace_s in (20.0, 5.0, 1.0):  # what is ended may start others on its way: look again
        marked = processes.with_variable(name, value)
        if not marked:
            break
        processes.stop(*marked, grace_s=grace_s)
        ended += [child.name for child in marked]
    return ended
