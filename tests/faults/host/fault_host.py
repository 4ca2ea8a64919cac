"""A borrowed host in one folder: real processes of the host program, a stand-in for SGLang, and its end state."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import stand_in_model

from hsx_demo import processes
from hsx_host import contract as c
from hsx_host import health, lease, procid, state
from hsx_host.guards import GuardRecord

FAULTS = Path(__file__).resolve().parents[1]
REPO = FAULTS.parents[1]
ROOMS = f"{REPO / 'plugins'}:{REPO / 'include'}"
HOST, SAMPLES, LONG_S = "127.0.0.1", 120, 120.0

MakeHost = Callable[..., "FaultHost"]
Row = Callable[..., None]


@dataclass(frozen=True)
class Looks:
    """What makes production the same server again."""

    command: list[str]
    environment: dict[str, str]
    cwd: str


@dataclass(frozen=True)
class Said:
    """What a verb answered."""

    rc: int
    document: dict[str, Any]
    log: str


class FaultHost:
    """One host. ``ttl_s``: the lease; ``settings``: changes of both servers' settings."""

    def __init__(self, folder: Path, *, ttl_s: float = 60.0, out: Path | None = None, **settings: Any) -> None:
        self.folder, self.token = folder, uuid.uuid4().hex
        self.control = folder / "control"
        self.control.mkdir()
        self.gpu = folder / "gpu.txt"
        self.gpu.write_text("")
        self.clock = folder / "clock.txt"
        self.clock.write_text("0")
        self.spec = self._spec(out or folder / "out", ttl_s, settings)
        self.spec_path = self.write(self.spec)
        self.env = {
            "PATH": f"{FAULTS / 'gpu'}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "PYTHONPATH": f"{ROOMS}:{FAULTS / 'clock'}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "FAULT_TOKEN": self.token,
            "FAULT_GPU": str(self.gpu),
            "FAULT_CLOCK": str(self.clock),
        }
        self._jobs = 0
        self._strangers: list[subprocess.Popen[bytes]] = []
        self.owner: subprocess.Popen[bytes] | None = None
        self.looks: Looks | None = None

    def _spec(self, out: Path, ttl_s: float, settings: dict[str, Any]) -> c.RunSpec:
        model = stand_in_model.make(self.folder / "model")
        stand_in_model.make_data(self.folder / "data.jsonl", SAMPLES)
        out.mkdir(exist_ok=True)
        port = free_port()
        server = c.ServerSettings(
            args=["--model-path", str(model), "--host", HOST, "--port", str(port), "--chunked-prefill-size", "64"],
            env={"PYTHONPATH": str(FAULTS / "stand_in"), "NCCL_PROTO": "LL", "FAULT_CONTROL": str(self.control)},
            host=HOST,
            port=port,
            start_timeout_s=60.0,
            stop_grace_s=3.0,
            soak_requests=3,
        )
        server = replace(server, **settings)
        return c.RunSpec(
            run_id="run-1",
            profile="faults",
            manager="process",
            host=c.HostSettings(sys.executable, str(self.folder / "home"), str(out), []),
            production=server,
            extraction=replace(server, args=[*server.args, "--disable-radix-cache", "--disable-cuda-graph"]),
            model=c.ModelSettings(str(model)),
            capture=c.CaptureSettings([1, 4], ["speculators_v1"], writers=1, ring_bytes=1 << 20),
            data=c.DataSettings(str(self.folder / "data.jsonl"), "d", SAMPLES, concurrency=2, request_timeout_s=60.0),
            benchmark=c.BenchmarkSettings(False, {}),
            cleanup=c.CleanupSettings("never", 0),
            lease_ttl_s=ttl_s,
        )

    # ------------------------------------------------------------------ servers and verbs

    def start_production(self) -> None:
        """Production as its owner starts it: not through hsx."""
        settings = self.spec.production
        self.owner = subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *settings.args],
            env={k: v for k, v in self.env.items() if k != "PYTHONPATH"} | {"OF_THE_OWNER": "yes"} | settings.env,
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        until(lambda: not health.problem(settings), "production answers")
        self.looks = looks(self.owner.pid)

    def write(self, spec: c.RunSpec) -> str:
        path = self.folder / f"spec-{spec.run_id}.json"
        path.write_text(c.encode(spec))
        return str(path)

    def verb(self, *argv: str, spec: str = "") -> Said:
        """Run one verb to its end, as the hook does."""
        command = [sys.executable, "-m", "hsx_host", *argv]
        at = command.index("--") if "--" in command else len(command)
        command[at:at] = ["--spec", spec or self.spec_path]
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, timeout=300, cwd=self.folder)
        assert done.stdout, (argv, done.returncode, done.stderr)
        return Said(done.returncode, json.loads(done.stdout), done.stderr)

    def ok(self, *argv: str, spec: str = "") -> Said:
        """A verb that must do what it is asked for."""
        said = self.verb(*argv, spec=spec)
        assert said.rc == 0, (argv, said)
        return said

    def popen(self, *argv: str, spec: str = "") -> subprocess.Popen[str]:
        """A verb that is not waited for."""
        command = [sys.executable, "-m", "hsx_host", *argv, "--spec", spec or self.spec_path]
        return subprocess.Popen(
            command, env=self.env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
        )

    def in_a_session_that_dies(self, *argv: str, after: Callable[[], Any]) -> None:
        """Run a verb in a session of its own, and end every process of that session once ``after`` holds."""
        command = [sys.executable, "-m", "hsx_host", *argv]
        at = command.index("--") if "--" in command else len(command)
        command[at:at] = ["--spec", self.spec_path]
        shell = ["sh", "-c", '"$@"; sleep 86400', "sh", *command]
        leader = subprocess.Popen(
            shell, env=self.env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        until(after, self.story)
        for child in processes.with_variable("FAULT_TOKEN", self.token):
            if session(child.pid) == leader.pid:
                self.kill(child.pid)
        leader.wait()

    def by_the_timer(self) -> Said:
        """What the unit of docs/operations.md does: its command, from /, with nothing of ours in the environment.
        With ``KillMode=process`` systemd leaves alone what it started; here too nothing but the command itself ends."""
        text = (REPO / "docs" / "operations.md").read_text()
        (line,) = re.findall(r"^ +ExecStart=(.*)$", text, re.MULTILINE)
        assert re.search(r"^ +KillMode=process$", text, re.MULTILINE)
        command = shlex.split(line.replace("/var/lib/hsx", str(self.home)))
        env = {k: v for k, v in self.env.items() if k not in ("PYTHONPATH", "HOME")}
        done = subprocess.run(
            command, env=env, cwd="/", stdin=subprocess.DEVNULL, capture_output=True, text=True, start_new_session=True
        )
        return Said(done.returncode, json.loads(done.stdout), done.stderr)

    def another(self, run_id: str) -> str:
        """The spec of another run of the same profile."""
        return self.write(replace(self.spec, run_id=run_id))

    def other_extraction_port(self) -> None:
        """From now on the extraction server has a port of its own."""
        old, port = self.spec.extraction, free_port()
        args = [str(port) if a == str(old.port) else a for a in old.args]
        self.spec = replace(self.spec, extraction=replace(old, args=args, port=port))
        self.spec_path = self.write(self.spec)

    def pages_to(self, file: Path) -> None:
        """From now on the profile names a pager: it appends to a file."""
        code = "import sys; open(sys.argv[1], 'a').write(sys.argv[2].replace(chr(10), ' ') + chr(10))"
        self.spec = replace(self.spec, page_command=[sys.executable, "-ISc", code, str(file)])
        self.spec_path = self.write(self.spec)

    def killed_before_it_writes(self, document: str, *argv: str, after: Callable[[], Any]) -> None:
        """Kill a verb in the moment in which it would write a document of ``state/``, once ``after`` holds: where its
        temporary file goes stands a pipe that nobody reads, at which it waits."""
        folder = self.home / "state"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        code = "import os, sys; sys.stdin.read(1); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
        verb = subprocess.Popen(
            [sys.executable, "-ISc", code, "-m", "hsx_host", *argv, "--spec", self.spec_path],
            env=self.env, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        pipe = folder / f".{document}.{verb.pid}.tmp"
        os.mkfifo(pipe)
        assert verb.stdin is not None
        verb.stdin.close()
        until(after, self.story)
        assert verb.poll() is None
        assert not (folder / document).exists()
        verb.kill()
        verb.wait()
        pipe.unlink()

    def start(self, *argv: str) -> str:
        """Start a verb as a detached job, as the DAG does; its id."""
        self._jobs += 1
        job = f"{argv[0]}-{self._jobs}"
        self.ok("job", "start", job, "--", *argv)
        return job

    def end_of(self, job: str) -> Said:
        """Poll a job to its end, as the trigger does; -1 for one that is gone without an exit code."""
        while True:
            status = self.ok("job", "poll", job).document
            if status["state"] != "running":
                break
            time.sleep(0.1)
        log = (self.home / "jobs" / job / "stderr").read_text()
        document = json.loads(status["document"]) if status["document"] else {}
        return Said(-1 if status["rc"] is None else status["rc"], document, log)

    def run(self, *argv: str) -> Said:
        """A detached job from its start to its end."""
        return self.end_of(self.start(*argv))

    def runner(self, job: str) -> int:
        """The process that leads a job's session."""
        return int(json.loads((self.home / "jobs" / job / "job.json").read_text())["pid"])

    # ------------------------------------------------------------------ what stands

    @property
    def home(self) -> Path:
        return Path(self.spec.host.home)

    def server(self) -> state.ServerState | None:
        return state.read_server(self.spec)

    def mode(self) -> str:
        """The mode on record; "none" where that server does not live."""
        server = self.server()
        up = server is not None and server.phase != "stopped" and procid.alive(procid.ProcId(server.pid, server.start))
        return f"{server.mode} {server.phase}" if server is not None and up else "none"

    def guards(self) -> set[procid.ProcId]:
        """The guards on record that live."""
        record = state.read_document(GuardRecord, self.home / "state" / "guard.json")
        found = {procid.ProcId(*pair) for pair in record.processes} if record else set()
        return {p for p in found if procid.alive(p)}

    def kill_guards(self) -> None:
        """All at once, also one that another starts in this moment."""
        while living := self.guards():
            for guard in living:
                self.kill(guard.pid)

    def journal(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in state.journal_tail(self.spec, 10000)]

    def told(self, event: str, after: int = 0, **facts: Any) -> bool:
        """Whether the journal has such a line, from its line ``after`` on."""
        return any(event in e["event"] and facts.items() <= e.items() for e in self.journal()[after:])

    def lapsed(self) -> bool:
        """Whether the lease is over: lapsed, or given back already."""
        held = lease.read(self.spec)
        return held is None or lease.lapsed(held)

    def published(self) -> int:
        manifests = Path(self.spec.host.output_root).glob("*/shards/*/manifest.jsonl")
        return sum(len(m.read_text().splitlines()) for m in manifests)

    # ------------------------------------------------------------------ steering

    def hold(self, name: str, value: str = "") -> None:
        (self.control / name).write_text(value)

    def free(self) -> None:
        """Let everything go that is held."""
        for file in self.control.iterdir():
            file.unlink(missing_ok=True)

    def stranger(self, port: int) -> subprocess.Popen[bytes]:
        """Somebody else's program that listens on a port."""
        code = f"import socket,time; s=socket.socket(); s.setsockopt(1,2,1); s.bind(('{HOST}',{port})); s.listen(); "
        child = subprocess.Popen([sys.executable, "-ISc", code + "print('up', flush=True); time.sleep(86400)"],
                                 stdout=subprocess.PIPE, start_new_session=True)  # fmt: skip
        assert child.stdout is not None
        self._strangers.append(child)
        child.stdout.readline()
        return child

    @contextmanager
    def polled(self) -> Iterator[None]:
        """Airflow lives: somebody polls, which renews the lease."""
        end = threading.Event()

        def beat() -> None:
            while not end.wait(0.5):
                with suppress(Exception):
                    lease.renew(self.spec)

        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            end.set()
            thread.join()

    def kill(self, pid: int) -> None:
        assert pid > 0, "0 would be this test's own process group"
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def kill_everything(self) -> None:
        """Every process of this host at once, production too, as a power cut does."""
        for _ in range(3):
            for child in processes.with_variable("FAULT_TOKEN", self.token):
                self.kill(child.pid)
            time.sleep(0.1)
        if self.owner is not None:
            self.owner.wait()

    def other_boot(self) -> None:
        """The records are from before a reboot: another boot id stands in each."""
        for file in [*(self.home / "state").glob("*.json"), *(self.home / "jobs").glob("*/job.json")]:
            file.write_text(file.read_text().replace(procid.boot_id(), "11111111-2222-3333-4444-555555555555"))
        for file in Path("/dev/shm").glob(f"hsx-fault-{self.token}-*"):  # memory, empty after a reboot
            file.unlink()

    def clean_up(self) -> None:
        self.free()
        self.kill_everything()
        for child in self._strangers:
            child.kill()
            child.wait()
        for file in Path("/dev/shm").glob(f"hsx-fault-{self.token}-*"):
            file.unlink()

    # ------------------------------------------------------------------ the end state

    def settled(self) -> None:
        """Production up and equal, lease free, no process of ours left, no temporary file."""
        until(lambda: self.mode() == "production running" and lease.read(self.spec) is None, self.story)
        assert not health.problem(self.spec.production)
        server = self.server()
        assert server is not None
        assert self.looks == looks(server.pid), "production came back, but not as it was"
        until(lambda: not self.strays(server), lambda: f"left: {self.strays(server)}\n{self.story()}")
        assert self.leftovers() == []
        assert not (self.home / "plugin").exists()
        assert all(s.poll() is None for s in self._strangers), "a stranger's process was ended"

    def strays(self, production: state.ServerState) -> list[str]:
        """Processes that carry this host's token and are not production's."""
        return [
            f"{child.pid} {child.name}"
            for child in processes.with_variable("FAULT_TOKEN", self.token)
            if procid.alive(procid.ProcId(child.pid, child.ticks)) and session(child.pid) != production.sid
        ]

    def leftovers(self) -> list[str]:
        """Temporary files, and shared memory that no living server holds."""
        roots = (self.home, Path(self.spec.host.output_root))
        names = [p for root in roots for p in root.rglob("*") if p.suffix in (".tmp", ".part")]
        names += [p for p in Path(self.spec.host.output_root).glob("*/tmp/*") if p not in names]
        living = self.server()
        shm = Path("/dev/shm").glob(f"hsx-fault-{self.token}-*")
        names += [p for p in shm if living is None or not p.name.endswith(f"-{living.pid}")]
        return [str(p) for p in names]

    def story(self) -> str:
        """For an assertion that fails."""
        guards = "\n".join(p.read_text()[-2000:] for p in self.home.glob("runs/*/guard.log"))
        lines = "\n".join(str({k: v for k, v in e.items() if k != "command"}) for e in self.journal()[-30:])
        return f"mode {self.mode()}, lease {lease.read(self.spec)}\n{lines}\nguard:\n{guards}"


def looks(pid: int) -> Looks:
    command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    raw = Path(f"/proc/{pid}/environ").read_bytes().decode()
    environment = dict(item.split("=", 1) for item in raw.split("\0") if "=" in item)
    return Looks(command, environment, os.readlink(f"/proc/{pid}/cwd"))


def session(pid: int) -> int:
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return -1


def free_port() -> int:
    with socket.socket() as s:
        s.bind((HOST, 0))
        return int(s.getsockname()[1])


def until(condition: Callable[[], Any], what: str | Callable[[], str], seconds: float = LONG_S) -> None:
    """Wait until something holds; the limit only ends a test that hangs."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"did not come about: {what if isinstance(what, str) else what()}")
        time.sleep(0.05)
