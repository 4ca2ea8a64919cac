"""The spool's documents: the plugin's shapes are the client's, and what does not fit is named."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from hsx_capture import layout, spec
from hsx_host import spool, wire

REQUEST = spec.CaptureRequest("hsx-1", "/x", 3, 7, [spec.Plane("2", 64, 8), spec.Plane("final", 88, 8)])
DOCUMENTS = [
    spec.CaptureSpec("id", "/spool", [2], 4, 4, "bfloat16", 2, 1 << 20),
    REQUEST,
    spec.CaptureRecord("hsx-1", 3, 48, 1, 7, [spec.PlaneRecord("2", 1, True, False, False)], "why"),
    spec.PluginReady("id", 1, 0, "0.5.23", "Llama", [2], 4, 4, "RMSNorm", 1e-5, {"a": "b"}, ""),
]


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda d: type(d).__name__)
def test_the_client_reads_what_the_plugin_writes(document: object, tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    spec.write(document, path)
    theirs = wire.decode(getattr(spool, type(document).__name__), path.read_text())
    assert dataclasses.asdict(theirs) == dataclasses.asdict(document)  # type: ignore[call-overload]
    assert [p.name for p in tmp_path.iterdir()] == ["document.json"]


@pytest.mark.parametrize("document", DOCUMENTS[:2], ids=lambda d: type(d).__name__)
def test_the_plugin_reads_what_the_client_writes(document: object, tmp_path: Path) -> None:
    cls = getattr(spool, type(document).__name__)
    body = {"type": cls.__name__, "version": wire.VERSION, **dataclasses.asdict(document)}  # type: ignore[call-overload]
    path = tmp_path / "document.json"
    path.write_text(wire.encode(wire.from_dict(cls, body)))
    assert spec.read(type(document), path) == document


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"type": "Other", "version": 1}', "expected CaptureRequest version 1, got 'Other'"),
        ('{"type": "CaptureRequest", "version": 2}', "version 2"),
        ('{"type": "CaptureRequest", "version": 1, "colour": 1}', "unknown field colour"),
        ('{"type": "CaptureRequest", "version": 1, "rid": "a"}', "field path is missing"),
    ],
)
def test_a_document_that_does_not_fit_is_named(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    path.write_text(text)
    with pytest.raises(spec.SpecError, match=reason):
        spec.read(spec.CaptureRequest, path)


def test_a_wrong_type_deep_inside_is_named(tmp_path: Path) -> None:
    path = tmp_path / "document.json"
    spec.write(REQUEST, path)
    body = json.loads(path.read_text())
    body["planes"][1]["offset"] = True
    path.write_text(json.dumps(body))
    with pytest.raises(spec.SpecError, match=r"CaptureRequest.planes\[1\].offset: expected int, got True"):
        spec.read(spec.CaptureRequest, path)


def planes(*places: tuple[int, int]) -> list[spec.Plane]:
    return [spec.Plane(str(i), offset, stride) for i, (offset, stride) in enumerate(places)]


def test_blocks_join_planes_that_lie_side_by_side() -> None:
    assert layout.blocks(planes((0, 8), (80, 8), (160, 8)), 8) == (
        layout.Block(0, 1, 0, 8),
        layout.Block(1, 1, 80, 8),
        layout.Block(2, 1, 160, 8),
    )
    assert layout.blocks(planes((5, 24), (13, 24), (21, 24)), 8) == (layout.Block(0, 3, 5, 24),)
    assert layout.blocks(planes((0, 16), (8, 16), (160, 8)), 8) == (
        layout.Block(0, 2, 0, 16),
        layout.Block(2, 1, 160, 8),
    )


def test_contiguous_planes_of_one_token_stay_apart() -> None:
    # one row each, one after the other: side by side in bytes, but a row of either is 8 bytes and not 16
    assert [b.planes for b in layout.blocks(planes((0, 8), (8, 8)), 8)] == [1, 1]


def test_file_bytes_is_the_end_of_the_last_row() -> None:
    assert layout.file_bytes(layout.blocks(planes((64, 8), (88, 8)), 8), 3, 8) == 88 + 24
    assert layout.file_bytes(layout.blocks(planes((64, 16), (72, 16)), 8), 3, 8) == 64 + 48


def test_without_a_spec_the_plugin_imports_nothing_and_registers_nothing() -> None:
    code = (
        "import sys, hsx_capture.plugin as p; before = set(sys.modules); p.load();"
        "assert set(sys.modules) == before and 'torch' not in before and 'sglang' not in before"
    )
    folder = Path(spec.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(folder)}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
