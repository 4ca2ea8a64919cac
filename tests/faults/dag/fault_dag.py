"""The whole DAG on real parts (Airflow's own components, SSH, the host program), with a stand-in for SGLang."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import stand_in_model
from stands import NOTIFIER_PATH

from hsx_demo import processes
from hsx_demo.client import AirflowClient, Task
from hsx_demo.components import COMPONENTS, REPO
from hsx_demo.processes import Child
from hsx_demo.sshd import start_sshd
from hsx_demo.stack import DAG_ID, TOKEN, Stack
from hsx_host.contract import encode
from hsx_operators.answers import human_line
from hsx_operators.hosts import dag_id_of

FAULTS = Path(__file__).resolve().parents[1]
PATIENCE_S = 900.0
SAMPLES = 60

Row = Callable[..., None]


class Stand:
    """A borrowed host and an Airflow; both can be broken. The DAG and the profiles are copies, to be changed."""

    def __init__(self, work: Path, python_host: str, lease_s: int) -> None:
        self.work = work
        self.control = work / "control"
        self.control.mkdir()
        # one in production's arguments, one in the profile's environment, one in its env_file
        self.secrets = [f"s3cret-{where}-{uuid.uuid4().hex}" for where in ("key", "password", "file")]
        env_file = work / "production.env"
        env_file.touch(mode=0o600)
        env_file.write_text(f"HF_TOKEN={self.secrets[2]}\n")
        self.dags = Path(shutil.copytree(REPO / "dags", work / "dags", ignore=shutil.ignore_patterns("__pycache__")))
        self.profiles = Path(shutil.copytree(FAULTS / "dag" / "profiles", work / "profiles"))
        self.stack = Stack(
            work / "s",
            python_host=python_host,
            model=stand_in_model.make(work / "model"),
            dataset=stand_in_model.make_data(work / "first.jsonl", SAMPLES),
            profile="faults",
            extra_env={
                "HSX_PROFILES": str(self.profiles),
                "FAULT_STAND_IN": str(FAULTS / "stand_in"),
                "FAULT_CONTROL": str(self.control),
                "FAULT_KEY": self.secrets[0],
                "FAULT_PASSWORD": self.secrets[1],
                "FAULT_ENV_FILE": str(env_file),
                "FAULT_LEASE_S": str(lease_s),
                "PYTHONPATH": NOTIFIER_PATH,
                "HSX_TEST_ALERTS": str(work / "alerts.jsonl"),
                "FAULT_PAGES": str(work / "pages.txt"),
                "AIRFLOW__CORE__DAGS_FOLDER": str(self.dags),
                # a lost worker is seen after half a minute instead of five
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
                "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
                "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "15",
                "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
                "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "10",
            },
        )
        self._sets = 0

    def start(self) -> None:
        self.stack.start()
        assert self.stack.production is not None
        self.looks = looks(self.stack.production.pid)

    def stop(self) -> None:
        self.free()
        self.stack.stop()

    @property
    def airflow(self) -> Any:
        assert self.stack.airflow is not None
        return self.stack.airflow

    @property
    def client(self) -> AirflowClient:
        client: AirflowClient = self.airflow.client()
        return client

    @property
    def home(self) -> Path:
        return self.stack.host_dir / "hsx"

    # ------------------------------------------------------------------ runs

    def trigger(self, **conf: Any) -> DagRun:
        """A run over new samples, unless ``dataset`` names a file."""
        self._sets += 1
        file = self.work / f"set{self._sets}.jsonl"
        if "dataset" not in conf:
            conf["dataset"] = str(stand_in_model.make_data(file, SAMPLES, seed=100 + self._sets))
        return DagRun(self, conf)

    def a_night_soon(self) -> DagRun:
        """The run of a profile that runs by itself, over samples of its own, three minutes from now."""
        at = time.gmtime(time.time() + 180)
        data = stand_in_model.make_data(self.work / "night.jsonl", SAMPLES, seed=77)
        body = (self.profiles / "faults.yaml").read_text().replace("${HSX_DEMO_DATASET}", str(data))
        (self.profiles / "night.yaml").write_text(f'{body}nightly: {{schedule: "{at.tm_min} {at.tm_hour} * * *"}}\n')
        dag_id = dag_id_of("night")
        until(lambda: self.client.has_dag(dag_id), "the nightly DAG is read")
        self.client.unpause(dag_id)
        runs = lambda: self.client.get(f"dags/{dag_id}/dagRuns")["dag_runs"]  # noqa: E731
        until(runs, "the night has come")
        return DagRun(self, {"dataset": str(data)}, dag_id=dag_id, run_id=runs()[0]["dag_run_id"])

    # ------------------------------------------------------------------ steering

    def hold(self, name: str, value: str = "") -> None:
        (self.control / name).write_text(value)

    def free(self) -> None:
        for file in self.control.iterdir():
            file.unlink(missing_ok=True)

    def kill(self, *components: str) -> None:
        """SIGKILL to Airflow's components and everything below them."""
        for name in components:
            child: Child = self.airflow.children.pop(name)
            for pid in [p.pid for p in psutil.Process(child.pid).children(recursive=True)] + [child.pid]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            until(lambda c=child: not processes.alive(c), f"{name} is gone")  # type: ignore[misc]

    def start_again(self, *components: str, **env: str) -> None:
        """Start components anew, and wait until Airflow is healthy."""
        self.airflow.env.update(env)
        for name in components:
            self.airflow.start(name)
        self.stack.save()
        self.airflow.wait_healthy(DAG_ID)

    def kill_all_of_airflow(self) -> None:
        self.kill(*(c for c in COMPONENTS if c in self.airflow.children))

    def acquired_from_a_shell(self, run_id: str) -> Callable[[], None]:
        """The lease for a run that this Airflow knows nothing of; call what it returns to give it up."""
        spec = self.work / f"{run_id}.json"
        spec.write_text(encode(self.stack.spec(run_id)))
        self.in_a_shell("acquire", "--spec", str(spec))
        return lambda: self.in_a_shell("release", "--spec", str(spec))

    def give_back_by_hand(self) -> None:
        """What the alarm tells: one command, from a shell on the host."""
        spec = self.work / "by-hand.json"
        spec.write_text(encode(self.stack.spec("by-hand")))
        self.in_a_shell("restore", "--now", "--spec", str(spec))
        self.in_a_shell("restore", "--lift", "--spec", str(spec))

    def in_a_shell(self, *words: str) -> None:
        """A verb of the host program, not through Airflow."""
        env = {**os.environ, "PYTHONPATH": str(REPO / "include"), TOKEN: self.stack.token}
        subprocess.run([self.stack.python_host, "-m", "hsx_host", *words], env=env, check=True, capture_output=True)

    def alerts(self) -> list[str]:
        """What Airflow's notifier was told of production."""
        file = self.work / "alerts.jsonl"
        told = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
        return [text for event, text in told if event == "production_not_restored"]

    def pages(self) -> str:
        """What the guards have told whoever is woken on the host."""
        file = self.work / "pages.txt"
        return file.read_text() if file.exists() else ""

    def told_in_commands(self) -> list[str]:
        """Command lines of any process with a secret in them, but for the servers', whose owner put one there."""
        found = []
        for p in psutil.process_iter(["cmdline"]):
            words = " ".join(p.info["cmdline"] or [])
            mine = self.secrets if "sglang.launch_server" not in words else self.secrets[1:]
            found += [words for secret in mine if secret in words]
        return found

    def told_in_files(self) -> list[str]:
        """Files with a secret in them: all of Airflow's (database, logs), all data sets, and of the host's all that
        others than the login may read, or that are not the frozen spec or the record of how production runs."""
        assert self.stack.output is not None
        found = []
        roots = (self.work / "s" / "airflow", self.stack.output, self.home, self.work / "s" / "ssh")
        files = [f for root in roots for f in root.rglob("*") if f.is_file()]
        for file in [*files, self.work / "alerts.jsonl", self.work / "pages.txt"]:
            body = file.read_bytes() if file.exists() else b""
            ours = file.is_relative_to(self.home) and file.stat().st_mode & 0o077 == 0
            kept = file.name in ("spec.json", "launch_base.json") or file.parent.name in ("specs", "logs")
            if any(secret.encode() in body for secret in self.secrets) and not (ours and kept):
                found.append(str(file))
        return found

    def door_closed(self) -> None:
        assert self.stack.ssh is not None
        self.stack.ssh.stop()

    def door_open(self) -> None:
        old = self.stack.ssh
        assert old is not None
        self.stack.ssh = start_sshd(self.stack.work / "ssh", port=old.port, env={TOKEN: self.stack.token})
        self.stack.save()

    # ------------------------------------------------------------------ what stands on the host

    def server(self) -> dict[str, Any]:
        return read_json(self.home / "state" / "server.json")

    def guards(self) -> list[int]:
        """The pids of the guards on record that live."""
        record = read_json(self.home / "state" / "guard.json")
        pairs = record.get("processes", [])
        return [pid for pid, start in pairs if processes.alive(Child("guard", pid, start, ""))]

    def kill_guards(self) -> None:
        """All at once, also one that another starts in this moment."""
        while living := self.guards():
            for pid in living:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def worker_of_a_task(self) -> list[int]:
        """Processes below the scheduler that run a task now: the executor's worker and the task itself."""
        below = psutil.Process(self.airflow.children["scheduler"].pid).children(recursive=True)
        found = []
        for p in below:
            with contextlib.suppress(psutil.Error):
                if tasks := p.children():
                    found += [p.pid, *(t.pid for t in tasks)]
        return found

    def journal(self) -> list[dict[str, Any]]:
        file = self.home / "state" / "journal.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def renewed(self) -> float:
        """When the lease was renewed last: each poll does."""
        return (self.home / "state" / "lease.json").stat().st_mtime

    def told(self, event: str, after: int = 0) -> bool:
        return any(event in e["event"] for e in self.journal()[after:])

    def settled(self) -> None:
        """Production up and equal, lease free, no process of ours left, no temporary file."""
        until(self._given_back, self.story)
        server = self.server()
        pid = int(server["pid"]) if server and server["phase"] == "running" else self.stack.production.pid  # type: ignore[union-attr]
        assert looks(pid) == self.looks, "production came back, but not as it was"
        assert self.stack.production_healthy()
        until(lambda: not self.strays(pid), lambda: f"left: {self.strays(pid)}\n{self.story()}")
        assert self.leftovers() == []
        assert not (self.home / "plugin").exists()

    def _given_back(self) -> bool:
        if (self.home / "state" / "lease.json").exists():
            return False
        server = self.server()
        if not server:
            return True
        up = processes.alive(Child("server", server["pid"], server["start"], ""))
        return up and (server["mode"], server["phase"]) == ("production", "running")

    def strays(self, production: int) -> list[str]:
        """Processes that belong to this host: not production's, not the SSH server's."""
        assert self.stack.ssh is not None
        own = {production, self.stack.ssh.child.pid}
        return [
            f"{c.pid} {c.name}"
            for c in processes.with_variable(TOKEN, self.stack.token)
            if processes.alive(c) and session(c.pid) not in own and "sshd" not in c.name
        ]

    def leftovers(self) -> list[str]:
        output = self.stack.output
        assert output is not None
        names = [p for root in (self.home, output) for p in root.rglob("*") if p.suffix in (".tmp", ".part")]
        return [str(p) for p in [*names, *output.glob("*/tmp/*")]]

    def story(self) -> str:
        lines = "\n".join(str({k: v for k, v in e.items() if k != "command"}) for e in self.journal()[-30:])
        guards = "\n".join(p.read_text()[-1500:] for p in self.home.glob("runs/*/guard.log"))
        return f"{read_json(self.home / 'state' / 'lease.json')}\n{self.server()}\n{lines}\nguards:\n{guards}"


class DagRun:
    """One run of the DAG, and what is asked of it."""

    def __init__(self, stand: Stand, conf: dict[str, Any], *, dag_id: str = DAG_ID, run_id: str = "") -> None:
        self.stand, self.conf, self.dag_id = stand, conf, dag_id
        self.id = run_id or stand.client.trigger(dag_id, conf)

    def state(self) -> str:
        return self.stand.client.run_state(self.dag_id, self.id)

    def end(self) -> str:
        """The run's state, once it has ended."""
        return self.stand.client.watch(self.dag_id, self.id, timeout_s=PATIENCE_S, poll_s=1.0)

    def tasks(self) -> dict[str, Task]:
        found = self.stand.client.tasks(self.dag_id, self.id)
        return {t.task_id if t.map_index < 0 else f"{t.task_id}.{t.map_index}": t for t in found}

    def states(self) -> dict[str, str]:
        return {name: t.state for name, t in self.tasks().items()}

    def log(self, name: str, try_number: int = 0) -> str:
        task = self.tasks()[name]
        if try_number:
            task = Task(**{**task.__dict__, "try_number": try_number})
        return "\n".join(self.stand.client.log_lines(self.dag_id, self.id, task))

    def past_the_wait_for_the_host(self) -> None:
        """Where acquire has met the lease, it tries again every five minutes: clear it, as a person would."""
        until(lambda: self.states().get("acquire") in ("up_for_retry", "success"), self.story, PATIENCE_S)
        if self.states()["acquire"] == "up_for_retry":
            assert "held by run" in self.log("acquire")
            self.clear("acquire", only_failed=False)

    def clear(self, task: str, map_index: int = -1, *, only_failed: bool) -> None:
        """Clear a task with what comes after it, as the UI's dialog does."""
        name = task if map_index < 0 else (task, map_index)
        self.stand.client.clear(self.dag_id, self.id, [name], only_failed=only_failed, include_downstream=True)

    def mark(self, task: str, state: str, map_index: int = -1) -> None:
        """Mark a task, as the UI's button does."""
        index = f"/{map_index}" if map_index >= 0 else ""
        self.stand.client.patch(
            f"dags/{self.dag_id}/dagRuns/{self.id}/taskInstances/{task}{index}", {"new_state": state}
        )

    def manifest(self) -> int:
        """How many samples of this run's data set are published."""
        assert self.stand.stack.output is not None
        name = Path(self.conf["dataset"]).stem
        files = self.stand.stack.output.glob(f"*-{name}-*/shards/*/manifest.jsonl")
        return sum(len(f.read_text().splitlines()) for f in files)

    def in_mid_shard(self, count: int = 10) -> None:
        """Until ``count`` samples are published and the task waits in the triggerer."""
        until(lambda: self._alive() and self.manifest() >= count, self.story, PATIENCE_S)
        until(lambda: self._alive() and self.states().get("extract.0") == "deferred", self.story, PATIENCE_S)
        deferred = time.time()  # the trigger polls too by now, not only the worker did
        until(lambda: self.stand.renewed() > deferred, self.story)

    def _alive(self) -> bool:
        state = self.state()
        assert state in ("queued", "running"), self.story()
        return True

    def story(self) -> str:
        bad = [n for n, t in self.tasks().items() if t.state in ("failed", "up_for_retry")]
        logs = "\n".join(f"--- {n}\n{self.log(n)[-2500:]}" for n in bad)
        return f"{self.state()} {self.states()}\n{logs}\n{self.stand.story()}"

    def job(self) -> dict[str, Any]:
        """This run's newest extraction job on the host."""
        files = sorted((self.stand.home / "jobs").glob("extract-*/job.json"), key=lambda f: f.stat().st_mtime)
        mine = f"{self.dag_id}/{self.id}@"  # as the host knows the run
        return [job for job in map(read_json, files) if job["run_id"].startswith(mine)][-1]

    def told_by_the_job(self) -> Counter[str]:
        """What that job has told, as a task's log shows it."""
        log = (self.stand.home / "jobs" / self.job()["id"] / "stderr").read_text()
        return Counter(human_line(line) for line in log.splitlines())


def looks(pid: int) -> tuple[list[str], dict[str, str], str]:
    """Command, environment and folder of a server."""
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
    environment = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
    return command, environment, os.readlink(f"/proc/{pid}/cwd")


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def read_json(file: Path) -> dict[str, Any]:
    """What stands in a file, nothing where there is none."""
    try:
        body: dict[str, Any] = json.loads(file.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return body


def until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = 300.0) -> None:
    """Wait until something holds; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about: {what if isinstance(what, str) else what()}")
        time.sleep(0.2)
