"""The bundle is its content: nothing else changes its name."""

from __future__ import annotations

import asyncio
import os
import py_compile
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hsx_host import contract as c
from hsx_operators import INCLUDE
from hsx_operators.answers import verb_command
from hsx_operators.bundle import CHANGED, check_command, make_bundle
from hsx_operators.errors import HostGarbage
from hsx_operators.triggers import HostJobTrigger

PATH = os.environ["PATH"]
PLANTED = "print('PLANTED')\nraise SystemExit(1)\n"


@pytest.fixture
def include(tmp_path: Path) -> Path:
    for name, text in {
        "hsx_host/__main__.py": "print(1)",
        "hsx_host/formats/v1.py": "x = 1",
        "patches/p/p/__init__.py": "",
        "profiles/demo.yaml": "a: 1",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_same_content_same_hash(include: Path) -> None:
    before = make_bundle(include)
    assert list(before.files) == ["hsx_host/__main__.py", "hsx_host/formats/v1.py", "patches/p/p/__init__.py"]
    assert before.folders == ["hsx_host", "hsx_host/formats", "patches", "patches/p", "patches/p/p"]
    (include / "hsx_host/__pycache__").mkdir()
    (include / "hsx_host/__pycache__/__main__.cpython-311.pyc").write_bytes(b"x")
    (include / "hsx_host/old.pyc").write_bytes(b"x")
    (include / "hsx_host/.editor.swp").write_bytes(b"x")
    os.utime(include / "hsx_host/__main__.py", (1, 1))
    assert make_bundle(include).sha256 == before.sha256


@pytest.mark.parametrize("change", ["content", "name", "moved bytes", "new", "gone"])
def test_other_content_other_hash(include: Path, change: str) -> None:
    before = make_bundle(include).sha256
    main, v1 = include / "hsx_host/__main__.py", include / "hsx_host/formats/v1.py"
    match change:
        case "content":
            main.write_text("print(2)")
        case "name":
            main.rename(include / "hsx_host/main.py")
        case "moved bytes":
            main.write_text("print(1)x")
            v1.write_text(" = 1")
        case "new":
            (include / "patches/README").write_text("")
        case "gone":
            v1.unlink()
    assert make_bundle(include).sha256 != before


def test_nothing_to_ship(include: Path) -> None:
    shutil.rmtree(include / "hsx_host")
    with pytest.raises(FileNotFoundError, match="hsx_host"):
        make_bundle(include)


def test_the_projects_own_bundle_holds_both_rooms() -> None:
    files = make_bundle().files
    assert files["hsx_host/contract/told.py"] == (INCLUDE / "hsx_host/contract/told.py").read_bytes()
    assert any(f.startswith("patches/hsx_capture/") for f in files)
    assert not any("__pycache__" in f for f in files)


@pytest.fixture
def shipped(include: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """``<home>/bundles/<sha256>`` as ``ship`` leaves it. Its program tells what the planted module of a test says."""
    (include / "hsx_host/__main__.py").write_text("import hsx_host.formats.v1\nimport quopri\nprint('as shipped')")
    (include / "hsx_host/__init__.py").write_text("")
    bundle = make_bundle(include)
    folder = tmp_path_factory.mktemp("home") / "bundles" / bundle.sha256
    for name, body in bundle.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(body)
    return folder


def in_a_shell(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["sh", "-c", command], cwd=folder, env={"PATH": PATH}, capture_output=True, text=True)


def checked(folder: Path) -> int:
    return in_a_shell(check_command(sys.executable, str(folder), folder.name), Path("/")).returncode


def said(folder: Path, cwd: Path = Path("/")) -> str:
    return in_a_shell(verb_command(sys.executable, str(folder), ["status"]), cwd).stdout.strip()


def _file(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PLANTED)


def _byte_code(path: Path) -> None:
    _file(path.with_suffix(".py"))
    py_compile.compile(str(path.with_suffix(".py")), cfile=str(path))
    path.with_suffix(".py").unlink()


def _link(path: Path) -> None:
    elsewhere = path.parents[3] / "elsewhere"
    _file(elsewhere / "__init__.py")
    path.symlink_to(elsewhere)


@pytest.mark.parametrize(
    ("plant", "where"),
    [
        (_file, "quopri.py"),
        (_file, "quopri/__init__.py"),
        (_byte_code, "quopri.pyc"),
        (_byte_code, "hsx_host/formats/more.pyc"),
        (_link, "quopri"),
        (_file, "hsx_host/formats/v1.py"),
        (os.mkfifo, "pipe"),
    ],
)
def test_nothing_that_was_not_shipped_passes_the_check(
    shipped: Path, plant: Callable[[Path], object], where: str
) -> None:
    assert (checked(shipped), said(shipped)) == (0, "as shipped")
    assert checked(shipped) == 0  # a verb leaves nothing in the bundle
    plant(shipped / where)
    assert checked(shipped) == CHANGED


def test_byte_code_beside_the_sources_is_never_run(shipped: Path) -> None:
    """What an older version's calls left there is no reason to refuse the host, so it must not be read either."""
    source = shipped / "hsx_host/formats/v1.py"
    info, body = source.stat(), source.read_bytes()
    source.write_text(PLANTED)
    os.utime(source, (info.st_mtime, info.st_mtime))
    py_compile.compile(str(source), invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH)
    source.write_bytes(body)
    assert list(source.parent.glob("__pycache__/v1.*.pyc"))
    assert (checked(shipped), said(shipped)) == (0, "as shipped")
    kept = list((shipped.parents[1] / "pycache").rglob("v1.*.pyc"))
    assert len(kept) == 1  # a poll every few seconds does not compile the program anew


def test_no_module_of_the_folder_is_run(shipped: Path, tmp_path: Path) -> None:
    _file(tmp_path / "quopri.py")
    assert said(shipped, tmp_path) == "as shipped"


def test_a_trigger_checks_the_program_before_it_polls(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once a connection, with the check that is sent."""
    ran: list[str] = []

    class Connection:
        async def run(self, command: str, **_: object) -> Any:
            ran.append(command)
            done = in_a_shell(command, Path("/"))
            return SimpleNamespace(exit_status=done.returncode, stdout=done.stdout, stderr=done.stderr)

        def abort(self) -> None:
            pass

    async def connect(self: object) -> Connection:
        return Connection()

    monkeypatch.setattr("hsx_operators.triggers.SSHHookAsync.get_conn", connect)
    monkeypatch.setattr("hsx_operators.triggers.SSHHookAsync.__init__", lambda self, **_: None)
    host = {"ssh_conn_id": "x", "python": sys.executable, "bundle_dir": str(shipped), "spec_path": "/s"}
    trigger = HostJobTrigger(host, "j")
    for _ in range(2):
        with pytest.raises(HostGarbage, match="as shipped"):  # the stand-in answers no document
            asyncio.run(trigger.verb(c.Lease, ["status"]))
    assert [("hashlib" in command) for command in ran] == [True, False, False]
    _file(shipped / "quopri.py")
    ran.clear()
    with pytest.raises(HostGarbage, match="not the one that was shipped"):
        asyncio.run(HostJobTrigger(host, "j").verb(c.Lease, ["status"]))
    assert len(ran) == 1
