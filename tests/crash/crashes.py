"""One crash of an extraction at a moment, and what the data set must be after it was resumed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from extraction_host import Host
from reference import Reference

LENGTHS = [40 + 7 * i for i in range(30)]
NEAR = 0.05  # relative error that another batch's composition may make in bf16; another row or layer is off by 0.3
TRIES = 4
VICTIMS = ("client", "scheduler", "server", "all")


@dataclass
class Tally:
    """What one kind of crash came to over all its moments."""

    crashes: int = 0
    struck: int = 0  # while the extraction was at work
    calls: int = 0  # of ``extract`` after the crash, until the shard was whole
    equal: int = 0  # files equal to the uninterrupted run's to the bit
    differing: int = 0
    worst: float = 0.0  # relative error of the differing ones


@dataclass
class Setting:
    """A host in extraction mode, and a data set that nothing interrupted."""

    host: Host
    whole: Host
    data: Path
    names: Any = field(default_factory=lambda: iter(range(10_000)))


TALLIES: dict[str, Tally] = defaultdict(Tally)


def table() -> list[str]:
    """Markdown of the tallies; nothing where no crash was made."""
    if not TALLIES:
        return []
    head = ["| killed | crashes | while at work | calls until whole | files equal to the bit | others | worst error |"]
    rows = [
        f"| {name} | {t.crashes} | {t.struck} | {t.calls} | {t.equal} | {t.differing} | {t.worst:.4f} |"
        for name, t in TALLIES.items()
    ]
    return [*head, "|---|---|---|---|---|---|---|", *rows]


def crash(setting: Setting, victim: str, seed: int, what: str = "") -> Tally:
    """Kill ``victim`` at a seeded moment, resume, and compare with the uninterrupted data set.

    :param what: the tally's name, where it is not the victim's.
    """
    rng = random.Random(f"{victim} {seed}")
    made, client = _at_work(setting, f"{victim}{seed}", rng)
    tally = TALLIES[what or victim]
    tally.crashes += 1
    tally.struck += client.poll() is None
    kill(made, victim, client)
    out, err = client.communicate(timeout=300)
    assert client.returncode in (0, 75, -signal.SIGKILL), (client.returncode, out, err[-3000:])
    before = made.manifest()
    for _ in range(TRIES):
        tally.calls += 1
        done = subprocess.run(made.command("extract", "--shard", "0"), capture_output=True, text=True, timeout=600)
        assert done.returncode in (0, 75), (done.stdout, done.stderr[-3000:])
        if done.returncode == 0:
            break
    assert done.returncode == 0, f"not whole after {TRIES} calls: {done.stdout}"
    after = made.manifest()
    assert all(after[row] == line for row, line in before.items()), "a published sample was extracted again"
    assert made.verb("verify", "--deep")["ok"]
    nothing_left(made)
    compare(setting.whole, made, tally)
    shutil.rmtree(made.dataset)
    return tally


def _at_work(setting: Setting, name: str, rng: random.Random) -> tuple[Host, subprocess.Popen[str]]:
    """An extraction at a moment of ``rng``'s; where it was done before the moment came, another one at the next."""
    while True:
        data = setting.data.with_name(f"{name}-{next(setting.names)}.jsonl")
        shutil.copy(setting.data, data)
        made = setting.host.with_data(data)
        made.verb("plan")
        client = made.start("extract", "--shard", "0")
        published, pause = rng.randrange(len(LENGTHS)), rng.uniform(0, 0.15)
        while client.poll() is None and len(made.manifest()) < published:
            time.sleep(0.002)
        time.sleep(pause)
        if client.poll() is None:
            return made, client
        _, err = client.communicate()
        assert client.returncode == 0, err[-3000:]
        shutil.rmtree(made.dataset)


def kill(host: Host, victim: str, client: subprocess.Popen[str]) -> None:
    """SIGKILL to the client, the scheduler, the server's main process, or to all that the server and the client are."""
    state = json.loads(Path(host.spec.host.home, "state/server.json").read_text())
    schedulers = [int(p.stem.split("-")[1]) for p in Path(state["spool"]).glob("ready-*.json")]
    pids = {
        "client": [client.pid],
        "scheduler": schedulers,
        "server": [state["pid"]],
        "all": [client.pid, *(pid for pid, _ in state["tree"])],
    }[victim]
    for pid in pids:
        if pid != client.pid or client.poll() is None:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue


def nothing_left(host: Host) -> None:
    """No unfinished file of any kind, in the data set or in the live server's spool."""
    temporary = [
        p for p in host.dataset.rglob("*") if p.is_file() and (p.suffix in (".part", ".tmp") or p.name[0] == ".")
    ]
    assert temporary == []
    assert [p for p in (host.dataset / "tmp").rglob("*") if p.is_file()] == []
    spool = Path(json.loads(Path(host.spec.host.home, "state/server.json").read_text())["spool"])
    assert [p.name for p in spool.glob("*hsx-*")] == []
    assert not (host.dataset / "shards/00000/suspects.json").exists()
    assert (host.dataset / "shards/00000/failures.jsonl").read_bytes() == b""


def compare(whole: Host, made: Host, tally: Tally) -> None:
    """File by file: the same names and sizes, and the same bytes or values within bf16's error."""
    wanted, lines = whole.manifest(), made.manifest()
    assert sorted(lines) == sorted(wanted)
    for row, line in lines.items():
        other = wanted[row]
        for key in ("file", "bytes", "tokens", "ids_hash"):
            assert line[key] == other[key], (row, key)
        ours, theirs = made.dataset / line["file"], whole.dataset / other["file"]
        if ours.read_bytes() == theirs.read_bytes():
            tally.equal += 1
            continue
        tally.differing += 1
        a, b = torch.load(ours, weights_only=True), torch.load(theirs, weights_only=True)
        for key in ("input_ids", "loss_mask"):
            assert torch.equal(a[key], b[key]), (row, key)
        worst = max(Reference.off(x, y) for x, y in zip(a["hidden_states"], b["hidden_states"], strict=True))
        tally.worst = max(tally.worst, worst)
        assert worst < NEAR, (row, worst)
