"""A stand-in for ``systemctl`` where systemd is not process 1: ``systemctl.py FOLDER VERB ...``, one unit a FOLDER.

It starts and ends real processes, in a real control group where this user may make one, and answers ``show`` as
systemd 255 does (KEY=VALUE lines in an order of its own; MainPID=0 and an empty ControlGroup where nothing runs).
``FOLDER/unit.json``: ``name``, ``argv``, ``env``, ``leave`` (KillMode=process: the main process alone is ended).
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

ROOTS = (Path("/sys/fs/cgroup/systemd"), Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Unit:
    def __init__(self, folder: Path) -> None:
        self.folder, self.body = folder, json.loads((folder / "unit.json").read_text())
        self.group = f"/hsx-test-{os.path.basename(folder)}.slice/{self.body['name']}"

    def main(self) -> int:
        try:
            pid = int((self.folder / "main").read_text())
        except (FileNotFoundError, ValueError):
            return 0
        return pid if alive(pid) else 0

    def cgroup(self) -> Path | None:
        return next((root / self.group[1:] for root in ROOTS if (root / self.group[1:]).is_dir()), None)

    def members(self) -> list[int]:
        where = self.cgroup()
        return [int(p) for p in (where / "cgroup.procs").read_text().split()] if where else []

    def start(self) -> None:
        if self.main():
            return
        for root in ROOTS:
            try:
                (root / self.group[1:]).mkdir(parents=True, exist_ok=True)
                break
            except OSError:
                continue
        pid = os.fork()
        if pid == 0:
            os.setsid()
            where = self.cgroup()
            if where:
                (where / "cgroup.procs").write_text(str(os.getpid()))
            null = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(null, fd)
            os.chdir("/")
            os.execve(
                self.body["argv"][0], self.body["argv"], self.body["env"] | {"INVOCATION_ID": os.urandom(8).hex()}
            )
        (self.folder / "main").write_text(str(pid))

    def stop(self) -> None:
        main = self.main()
        who = [main] if self.body.get("leave") else [main, *self.members()]
        for number, wait in ((signal.SIGTERM, 5), (signal.SIGKILL, 5)):
            for pid in filter(alive, filter(None, who)):
                os.kill(pid, number)
            end = time.monotonic() + wait
            while any(alive(p) for p in who if p) and time.monotonic() < end:
                time.sleep(0.05)

    def show(self) -> None:
        main = self.main()
        print(f"MainPID={main}\nControlGroup={self.group if main and self.cgroup() else ''}")
        print(f"LoadState=loaded\nActiveState={'active' if main else 'inactive'}")


def run() -> int:
    folder, verb, name = Path(sys.argv[1]), sys.argv[2], sys.argv[-1]
    unit = Unit(folder)
    with (folder / "asked").open("a") as f:
        f.write(verb + "\n")
    if name != unit.body["name"]:
        if verb == "show":
            print("LoadState=not-found\nActiveState=inactive\nMainPID=0\nControlGroup=")
            return 0
        sys.stderr.write(f"Failed to {verb} {name}: Unit {name} not found.\n")
        return 5
    if verb in unit.body.get("fails", []):
        sys.stderr.write(f"Failed to {verb} {name}: Interactive authentication required.\n")
        return 1
    getattr(unit, verb)()
    return 0


if __name__ == "__main__":
    sys.exit(run())
