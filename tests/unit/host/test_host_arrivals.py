"""Waiting for files of a folder, many threads at a time."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from hsx_host.arrivals import Arrivals


def looking() -> int:
    return sum(t.name == "hsx-arrivals" for t in threading.enumerate())


def test_each_waits_for_its_own_file_and_one_thread_looks(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path)
    (tmp_path / "early").touch()
    with ThreadPoolExecutor(20) as pool:
        waits = [pool.submit(arrivals.wait, f"f{i}", 20.0) for i in range(20)]
        assert arrivals.wait("early", 20.0)
        assert looking() == 1
        for i in range(19):
            (tmp_path / f"f{i}").touch()
        assert all(w.result() for w in waits[:19])
        assert not waits[19].done()
        (tmp_path / "f19").touch()
        assert waits[19].result()


def test_a_file_that_does_not_come_is_not_waited_for_longer(tmp_path: Path) -> None:
    arrivals = Arrivals(tmp_path)
    assert not arrivals.wait("never", 0.05)
    assert not arrivals.wait("never", 0.0)
    (tmp_path / "never").touch()
    assert arrivals.wait("never", 20.0)


def test_a_folder_that_goes_is_no_error_and_may_come_back(tmp_path: Path) -> None:
    folder = tmp_path / "spool"
    arrivals = Arrivals(folder)
    assert not arrivals.wait("a", 0.05)
    folder.mkdir()
    (folder / "a").touch()
    assert arrivals.wait("a", 20.0)
    shutil.rmtree(folder)
    assert not arrivals.wait("a", 0.05)


def test_nobody_looks_once_nobody_waits(tmp_path: Path) -> None:
    (tmp_path / "a").touch()
    assert Arrivals(tmp_path).wait("a", 20.0)
    for thread in [t for t in threading.enumerate() if t.name == "hsx-arrivals"]:
        thread.join(20)
    assert looking() == 0
