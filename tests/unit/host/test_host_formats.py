"""Formats to the byte: laid out and filled files against torch's own, and against zip tools."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tempfile
import zipfile
from pathlib import Path

import host_data as h
import numpy as np
import pytest
import torch

from hsx_host import formats
from hsx_host.errors import BadInput
from hsx_host.formats import Shape, specforge
from hsx_host.formats import speculators_v1 as v1


@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 255, 256, 257])
def test_filled_file_equals_torch_saves(tmp_path: Path, tokens: int) -> None:
    rng = np.random.default_rng(tokens)
    ids, mask = rng.integers(0, 300, tokens), rng.integers(0, 2, tokens)
    planes = h.states(tokens)
    path = tmp_path / "x.part"
    h.sample_file(path, ids, mask, planes)
    body = torch.load(path, mmap=True, weights_only=True)
    assert list(body) == ["input_ids", "hidden_states", "loss_mask"]
    assert isinstance(body["hidden_states"], list)
    assert body["input_ids"].dtype == body["loss_mask"].dtype == torch.long
    assert body["input_ids"].tolist() == ids.tolist()
    assert body["loss_mask"].tolist() == mask.tolist()
    assert all(torch.equal(a, b) for a, b in zip(body["hidden_states"], planes, strict=True))
    saved = io.BytesIO()
    wanted = {"input_ids": torch.from_numpy(ids), "hidden_states": planes, "loss_mask": torch.from_numpy(mask)}
    torch.save(wanted, saved)
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(saved) as theirs:
        assert ours.testzip() is None
        assert ours.namelist() == theirs.namelist()
        for name in ours.namelist():
            if not name.endswith("serialization_id"):  # torch makes it of the checksums while it writes
                assert ours.read(name) == theirs.read(name), name
                assert ours.getinfo(name).CRC == theirs.getinfo(name).CRC
                assert ours.getinfo(name).header_offset == theirs.getinfo(name).header_offset


def test_a_zip_tool_that_reads_data_descriptors_agrees(tmp_path: Path) -> None:
    """Python's zipfile reads the central directory only; here the stream is read from its front."""
    path = tmp_path / "x.pt"
    h.sample_file(path, [1, 2, 3], [0, 1, 1], h.states(3))
    data = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        for info in archive.infolist():
            names = int.from_bytes(data[info.header_offset + 26 : info.header_offset + 28], "little")
            extra = int.from_bytes(data[info.header_offset + 28 : info.header_offset + 30], "little")
            behind = info.header_offset + 30 + names + extra + info.file_size
            assert data[behind : behind + 4] == b"PK\7\10"
            assert int.from_bytes(data[behind + 4 : behind + 8], "little") == info.CRC


@pytest.mark.parametrize("hidden", [64, 96, 576, 7168])
@pytest.mark.parametrize("planes", [2, 4])
def test_size_is_torchs_own(hidden: int, planes: int) -> None:
    shape = Shape([f"layer_{i}" for i in range(planes - 1)] + ["final"], hidden, "bfloat16")
    for tokens in [*range(1, 70), 255, 256, 257, 1023, 4096, 10_648, 65_535, 65_536]:
        with tempfile.TemporaryFile() as f:
            v1._skeleton(f, tokens, planes, hidden, "bfloat16")
            assert v1.file_bytes(tokens, shape) == f.seek(0, os.SEEK_END), (tokens, hidden)


def test_laid_out_file_is_sparse(tmp_path: Path) -> None:
    shape = Shape(h.PLANES, 7168, "bfloat16")
    path = tmp_path / "x.part"
    laid = v1.lay_out(path, np.zeros(2000, np.int32), np.ones(2000, np.uint8), shape)
    assert path.stat().st_size == laid.bytes == v1.file_bytes(2000, shape) > 2000 * 4 * 7168 * 2
    assert path.stat().st_blocks * 512 < 200_000


def test_file_that_exists_is_not_laid_over(tmp_path: Path) -> None:
    path = tmp_path / "x.part"
    path.write_text("somebody's")
    with pytest.raises(FileExistsError):
        v1.lay_out(path, np.zeros(2, np.int32), np.ones(2, np.uint8), h.SHAPE)
    assert path.read_text() == "somebody's"


@pytest.mark.parametrize("cut", [1, 30, 5000])
def test_check_finds_cut_files(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "x.pt"
    crcs = h.sample_file(path, [1] * 19, [1] * 19, h.states(19))
    found, places = v1.check(path, 19, h.SHAPE)
    assert found == crcs
    assert places["final"][1] == 19 * h.HIDDEN * 2
    with pytest.raises(ValueError, match="bytes instead of"):
        v1.check(path, 20, h.SHAPE)
    os.truncate(path, path.stat().st_size - cut)
    with pytest.raises(ValueError, match=r"not a whole torch\.save file"):
        v1.check(path, 19, h.SHAPE)


def test_check_finds_missing_planes(tmp_path: Path) -> None:
    path = tmp_path / "x.pt"
    h.sample_file(path, [1] * 9, [1] * 9, h.states(9))
    more = Shape([*h.PLANES, "one_more"], h.HIDDEN, "bfloat16")
    with pytest.raises(ValueError, match=r"bytes instead of|missing"):
        v1.check(path, 9, more)


def test_side_files_are_complete_and_have_string_keys(tmp_path: Path) -> None:
    v1.side_files(tmp_path, {10: 7, 2: 5}, {"layers": [1]})
    assert json.loads((tmp_path / "sample_lengths.json").read_text()) == {"2": 5, "10": 7}
    assert json.loads((tmp_path / "data_config.json").read_text()) == {"layers": [1]}
    assert not [p for p in tmp_path.iterdir() if p.name.endswith("pt")]


def test_specforge_file(tmp_path: Path) -> None:
    planes = h.states(6)
    sample = {"input_ids": torch.arange(6), "loss_mask": torch.ones(6, dtype=torch.long), "planes": planes}
    path = tmp_path / specforge.file_name(4321)
    assert path == tmp_path / "rows_4000-6000/data_4321.ckpt"
    specforge.write(path, sample, h.SHAPE)
    body = torch.load(path, weights_only=True)
    assert body["aux_hidden_state"].shape == (1, 6, 3 * h.HIDDEN)
    assert torch.equal(body["aux_hidden_state"][0, :, h.HIDDEN : 2 * h.HIDDEN], planes[1])
    assert torch.equal(body["hidden_state"][0], planes[3])
    assert os.listdir(path.parent) == ["data_4321.ckpt"]
    assert path.stat().st_size < 20_000, "a slice took its whole base along"


def test_settings_name_what_can_be_made() -> None:
    with h.refuses(BadInput, "capture.formats", "speculators_v1"):
        formats.direct(["specforge"])
    with h.refuses(BadInput, "capture.formats"):
        formats.direct(["speculators_v1", "speculators_v1"])
    with h.refuses(BadInput, "--format", "specforge"):
        formats.derived("speculators_v1")


def test_importing_the_registry_is_light() -> None:
    import sys

    code = "import sys; import hsx_host.plan, hsx_host.handoff, hsx_host.convert; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
