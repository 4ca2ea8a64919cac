"""A plan that moves published samples takes effect as a whole, whenever it is killed or its disk is full."""

from __future__ import annotations

import errno
import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import fingerprint, plan, reuse
from hsx_host.errors import HsxError
from hsx_host.manifest import judged
from hsx_host.shards import ShardFiles, read_input, shard_ids

CHANGES = ("link", "replace", "unlink", "rmdir", "ftruncate", "mkdir")  # what os has that changes a file system

UNTOUCHED = 7


def run(spec: c.RunSpec) -> c.PlanResult:
    return plan.run(spec, Namespace(dry_run=False, failed=False))


def standing(spec: c.RunSpec) -> int:
    """How many published samples the next extraction would keep, of all shards."""
    dataset, _ = fingerprint.opened(spec)
    files = [ShardFiles(dataset, shard) for shard in shard_ids(dataset)]
    return sum(len(judged(dataset, one.manifest, read_input(one).hashes())[0]) for one in files if one.input.exists())


@pytest.fixture
def moving(tmp_path: Path) -> tuple[c.RunSpec, Path, Callable[[], None]]:
    """Five published samples, a line inserted before all of them, and how to bring the data set back to that."""
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(5)))
    run(spec)
    dataset = h.publish(spec)
    h.write_lines(Path(spec.data.path), [h.line([9, 9]), *h.samples(5)])
    shutil.copytree(dataset, tmp_path / "before")

    def again() -> None:
        shutil.rmtree(dataset)
        shutil.copytree(tmp_path / "before", dataset)

    return spec, dataset, again


def struck(act: Callable[[], object], n: int, strike: Callable[[], None]) -> int:
    """``act`` in a process of its own, with ``strike`` instead of its n-th change; its exit code, or ``UNTOUCHED``."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    count = 0

    def counted(real: Callable[..., Any]) -> Callable[..., Any]:
        def change(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if count == n:
                strike()
            return real(*args, **options)

        return change

    for name in CHANGES:
        setattr(os, name, counted(getattr(os, name)))
    try:
        act()
    except HsxError as e:
        os._exit(e.code)
    except OSError as e:
        os._exit(75 if e.errno == errno.ENOSPC else 99)  # as the program's own end has it
    os._exit(0 if count >= n else UNTOUCHED)


def killed() -> None:
    os._exit(9)


def full() -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def interrupted(spec: c.RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that ends where it was about to take effect."""

    def no(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(reuse, "_finish", no)
        with pytest.raises(KeyboardInterrupt):
            run(spec)


@pytest.mark.parametrize("strike", [killed, full])
def test_no_sample_is_lost_wherever_it_is_struck(
    moving: tuple[c.RunSpec, Path, Callable[[], None]], strike: Callable[[], None]
) -> None:
    """Whatever comes next: an extraction with whatever inputs there are, or another plan."""
    spec, dataset, again = moving
    ends = set()
    for n in range(1, 500):
        again()
        code = struck(lambda: run(spec), n, strike)
        ends.add(code)
        if n % 2:
            assert standing(spec) == 5, n
        planned = run(spec)
        assert (planned.done, planned.todo) == (5, 1), n
        assert standing(spec) == 5, n
        assert not (dataset / "tmp/plan").exists(), n
        if code == UNTOUCHED:
            break
    assert n > 30
    assert {UNTOUCHED} < ends <= {UNTOUCHED, 0, 9, 75}, "0: a note of a lock, which may fail"


def test_a_dry_run_counts_what_an_unfinished_plan_moves(
    moving: tuple[c.RunSpec, Path, Callable[[], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, dataset, _ = moving
    interrupted(spec, monkeypatch)
    held = sorted((dataset / "tmp/plan").iterdir())
    dry = plan.run(spec, Namespace(dry_run=True, failed=False))
    assert (dry.done, dry.todo) == (5, 1)
    assert sorted((dataset / "tmp/plan").iterdir()) == held
    assert replace(run(spec), moved=0) == replace(dry, moved=0)
