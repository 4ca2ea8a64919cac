"""The bundle is its content: nothing else changes its name."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from hsx_operators import INCLUDE
from hsx_operators.bundle import make_bundle


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
