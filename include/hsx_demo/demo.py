"""``make demo``, ``make demo-training``, ``make up`` and ``make down``: the whole DAG on one machine, on real parts.

Runs under the Airflow environment's Python; ``HSX_HOST_PYTHON`` names the one that has SGLang. Everything lies in
``build/demo`` of the checkout, but for what is kept between runs (model, data set) in ``${HSX_CACHE:-~/.cache/hsx}``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from hsx_demo import model as demo_model
from hsx_demo import summary
from hsx_demo.client import AirflowClient, Task
from hsx_demo.components import REPO, USER
from hsx_demo.dataset import dataset_file
from hsx_demo.environments import cache_root
from hsx_demo.errors import DemoError
from hsx_demo.stack import DAG_ID, TRAINING_DAG_ID, Stack, stop_saved

WORK = REPO / "build" / "demo"
RUN_TIMEOUT_S = 1800.0
TOLD = frozenset({"running", "success", "failed", "skipped", "up_for_retry", "upstream_failed", "awaiting_input"})


class Stopwatch:
    """Prints what is being done with the seconds since the start."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    def say(self, text: str) -> None:
        """One line, now."""
        print(f"[{time.monotonic() - self._began:6.1f} s] {text}", flush=True)


def demo() -> int:
    """Everything from nothing to a green run; 0 only where it is green. Always stops what it started."""
    conf = read_conf()
    watch = Stopwatch()
    with _only_one():
        _clear_work()
        stack = new_stack(watch)
        try:
            stand_up(stack, watch)
            return run(stack, conf, watch)
        finally:
            # a second Ctrl-C must not leave servers behind
            with _uninterrupted():
                watch.say("stopping what was started")
                stack.stop()


def training() -> int:
    """The demo, and behind it the training DAG, which the hand-off's Asset starts; 0 where both are green."""
    conf = {"benchmark": "off", **read_conf()}
    watch = Stopwatch()
    with _only_one():
        _clear_work()
        stack = new_stack(watch)
        watch.say("looking for the trainer's environment (made the first time)")
        stack.trainer = trainer_python(stack.python_host)
        try:
            stand_up(stack, watch)
            assert stack.airflow is not None
            client = stack.airflow.client()
            client.unpause(TRAINING_DAG_ID)
            if code := run(stack, conf, watch):
                return code
            run_id = client.wait_for_run(TRAINING_DAG_ID)
            watch.say(f"the hand-off has started {TRAINING_DAG_ID}, run {run_id}")
            state = follow(client, TRAINING_DAG_ID, run_id, watch)
            print()
            print("\n".join(summary.training_lines(client, run_id, state)))
            if state != "success":
                print_failures(client, run_id, TRAINING_DAG_ID)
            return 0 if state == "success" else 1
        finally:
            with _uninterrupted():
                watch.say("stopping what was started")
                stack.stop()


def trainer_python(python_host: str) -> str:
    """The Python that has speculators: a layer over the host's, made where it is missing."""
    command = [python_host, "-m", "hsx_demo.trainer_env", "speculators-0.7"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"the trainer's environment could not be made:\n{done.stderr.strip()[-3000:]}")
    return done.stdout.strip().splitlines()[-1]


def up() -> int:
    """The same without the run: Airflow and the server stay up for a person."""
    watch = Stopwatch()
    with _only_one():
        _clear_work()
        stack = new_stack(watch)
        try:
            stand_up(stack, watch)
        except BaseException:
            with _uninterrupted():
                stack.stop()
            raise
        (WORK / "up").touch()
    assert stack.airflow is not None
    print(f"\nAirflow     {stack.airflow.url}   (login {USER}, password {stack.airflow.password})")
    print(f"            {stack.airflow.url}/dags/{DAG_ID}: press Trigger")
    print(f"production  {stack.production_url}   (log {stack.work / 'production.log'})")
    print(f"output      {stack.output}\nmake down ends it all.")
    return 0


def down() -> int:
    """End what ``make up`` (or a demo that was killed) left."""
    with _only_one():
        ended = stop_saved(WORK)
    print(f"ended: {', '.join(ended)}" if ended else "nothing was up")
    return 0


# ------------------------------------------------------------------------------ the parts


def new_stack(watch: Stopwatch) -> Stack:
    """Folders, Python and model; nothing runs yet."""
    python_host = os.environ.get("HSX_HOST_PYTHON", "")
    if not os.access(python_host, os.X_OK):
        raise DemoError(
            f"HSX_HOST_PYTHON = {python_host!r}: is no Python (make sets it; from a shell, name the one with SGLang)"
        )
    given = os.environ.get("HSX_DEMO_DATASET", "")
    if given and not Path(given).is_file():
        raise DemoError(
            f"HSX_DEMO_DATASET = {given!r}: there is no such file (give a pre-tokenised .jsonl or .jsonl.gz)"
        )
    output = os.environ.get("HSX_DEMO_OUTPUT", "")
    return Stack(
        WORK,
        python_host=python_host,
        model=the_model(python_host, watch),
        dataset=Path(given).resolve() if given else None,
        output=Path(output) if output else None,
    )


def the_model(python_host: str, watch: Stopwatch) -> Path:
    """``HSX_DEMO_MODEL``, or the one of the cache, made where it is missing."""
    if given := os.environ.get("HSX_DEMO_MODEL"):
        if not (Path(given) / "config.json").is_file():
            raise DemoError(f"HSX_DEMO_MODEL = {given!r}: holds no config.json (give a Hugging Face model folder)")
        return Path(given).resolve()
    folder = cache_root() / "models" / f"{demo_model.PACKAGE}-{demo_model.VERSION}" / demo_model.NAME
    if not folder.is_dir():
        watch.say(f"making the model in {folder}")
        call_host(python_host, "hsx_demo.model", str(folder))
    return folder


def stand_up(stack: Stack, watch: Stopwatch) -> None:
    """SSH server, production, data set, Airflow; Airflow's database is made while production starts."""
    ssh = stack.start_host()
    watch.say(f"SSH server on {ssh.host}:{ssh.port}")
    stack.launch_production()
    watch.say(f"production SGLang is starting on port {stack.port}")
    failures: list[BaseException] = []

    def airflow() -> None:
        try:
            stack.start_airflow(wait=False)
        except BaseException as e:
            failures.append(e)

    if stack.dataset is None:
        stack.dataset = dataset_file(stack.model, cache_root() / "datasets")  # Airflow's environment names it now
    thread = threading.Thread(target=airflow, name="airflow")
    thread.start()
    try:
        stack.wait_production()
        watch.say(f"production serves {stack.model.name} on {stack.production_url}")
        if not stack.dataset.exists():
            options = ["--model", str(stack.model), "--url", stack.production_url, "--cache", str(stack.dataset.parent)]
            call_host(stack.python_host, "hsx_demo.dataset", *options)
        watch.say(f"data set: {stack.dataset}")
    finally:
        thread.join()
    if failures:
        raise failures[0]
    assert stack.airflow is not None
    stack.airflow.wait_healthy(DAG_ID)
    watch.say(f"Airflow is up on {stack.airflow.url}")


def run(stack: Stack, conf: dict[str, Any], watch: Stopwatch) -> int:
    """One run of the DAG through the REST API, watched to its end; prints the summary or what failed."""
    assert stack.airflow is not None
    client = stack.airflow.client()
    run_id = client.trigger(DAG_ID, conf)
    watch.say(f"triggered {DAG_ID}, run {run_id}" + (f", Params {json.dumps(conf)}" if conf else ""))
    state = follow(client, DAG_ID, run_id, watch)
    print()
    print(summary.text(client, run_id, state))
    if state != "success":
        print_failures(client, run_id)
    return 0 if state == "success" else 1


def follow(client: AirflowClient, dag_id: str, run_id: str, watch: Stopwatch) -> str:
    """Tell every turn of a run's tasks until the run has ended; how it ended."""
    told: set[tuple[str, str, int]] = set()

    def turned(task: Task) -> None:
        # a task that resumes after it was deferred runs again: told once a try
        this = (task.name, task.state, task.try_number)
        if task.state not in TOLD or this in told:
            return
        told.add(this)
        took = f" after {task.seconds:.1f} s" if task.state in ("success", "failed") else ""
        watch.say(f"  {task.name}: {task.state}{took}")

    return client.watch(dag_id, run_id, turned=turned, timeout_s=RUN_TIMEOUT_S)


def print_failures(client: AirflowClient, run_id: str, dag_id: str = DAG_ID) -> None:
    """The end of each failed task's log."""
    for task in client.tasks(dag_id, run_id):
        if task.state == "failed":
            print(f"\n--- {task.name} failed; the end of its log:")
            with contextlib.suppress(DemoError):
                print("\n".join(list(client.log_lines(dag_id, run_id, task))[-30:]))


def call_host(python_host: str, module: str, *arguments: str) -> str:
    """Run a module under the host's Python; the last line that it printed. Its stderr is shown where it fails."""
    env = {**os.environ, "PYTHONPATH": str(REPO / "include"), "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [python_host, "-m", module, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise DemoError(f"{module} failed:\n{done.stderr.strip()[-3000:]}")
    return done.stdout.strip().splitlines()[-1]


def read_conf() -> dict[str, Any]:
    """The Params of ``HSX_DEMO_CONF``, a JSON object."""
    text = os.environ.get("HSX_DEMO_CONF", "").strip() or "{}"
    try:
        conf = json.loads(text)
    except ValueError as e:
        raise DemoError(f"HSX_DEMO_CONF = {text!r}: is not JSON: {e}") from None
    if not isinstance(conf, dict):
        raise DemoError(f"HSX_DEMO_CONF = {text!r}: is not a JSON object of Params")
    return conf


# ------------------------------------------------------------------------------ one at a time, and the end


@contextlib.contextmanager
def _only_one() -> Iterator[None]:
    """One demo, up or down a checkout at a time."""
    WORK.parent.mkdir(parents=True, exist_ok=True)
    with (WORK.parent / "demo.lock").open("w") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DemoError(f"another make demo, up or down is at work in {REPO}: wait for it, or end it") from None
        yield


def _clear_work() -> None:
    """An empty folder; refuses where ``make up`` stands, and ends what a killed demo left."""
    if (WORK / "stack.json").exists():
        if (WORK / "up").exists():
            raise DemoError(f"make up stands in {WORK}: make down first")
        stop_saved(WORK)
    shutil.rmtree(WORK, ignore_errors=True)


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Ctrl-C and SIGTERM wait until the block is through."""
    signals = (signal.SIGINT, signal.SIGTERM)
    before = {s: signal.signal(s, signal.SIG_IGN) for s in signals}
    try:
        yield
    finally:
        for s, handler in before.items():
            signal.signal(s, handler)


def _on_sigterm(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main() -> int:
    """Run one of the three; an error is one clear message."""
    parser = argparse.ArgumentParser(prog="python -m hsx_demo.demo", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("what", choices=("demo", "training", "up", "down"))
    what = parser.parse_args().what
    signal.signal(signal.SIGTERM, _on_sigterm)
    try:
        return {"demo": demo, "training": training, "up": up, "down": down}[what]()
    except DemoError as e:
        print(f"hsx demo: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        print("hsx demo: interrupted", file=sys.stderr)
        return 130
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
