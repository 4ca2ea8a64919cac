"""Formats to the byte: laid out and filled files against torch's own, and against zip tools."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import host_data as h
import numpy as np
import pytest
import torch

from hsx_host import converted, fill, formats
from hsx_host.checksum import crc32
from hsx_host.dataset import identity
from hsx_host.errors import BadInput
from hsx_host.formats import Shape, specforge
from hsx_host.formats import speculators_v1 as v1
from hsx_host.layouts.torchzip import records
from hsx_host.manifest import Published


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
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None


@pytest.mark.parametrize("tokens", [1, 300, 70_000])
def test_what_torch_reads_is_what_torch_would_have_written(tmp_path: Path, tokens: int) -> None:
    """The pickle and the small records mean the same as torch's own; tensors lie where torch maps them."""
    shape = Shape(h.PLANES, 64, "bfloat16")
    path = tmp_path / "x.part"
    laid = v1.lay_out(path, np.arange(tokens, dtype=np.int32), np.ones(tokens, np.uint8), shape)
    body = torch.load(path, mmap=True, weights_only=True)
    tensors = [body["input_ids"], *body["hidden_states"], body["loss_mask"]]
    base = tensors[0].data_ptr() - records(path)["data/0"].offset
    assert [t.data_ptr() - base for t in body["hidden_states"]] == [p.offset for p in laid.planes]
    assert all(t.data_ptr() % 64 == 0 and t.is_contiguous() for t in tensors)
    saved = tmp_path / "torchs.pt"
    torch.save(body, saved)
    theirs = torch.load(saved, weights_only=True)
    assert [(t.shape, t.stride(), t.dtype) for t in tensors] == [
        (t.shape, t.stride(), t.dtype) for t in [theirs["input_ids"], *theirs["hidden_states"], theirs["loss_mask"]]
    ]
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(saved) as torchs:
        for name in ("byteorder", "version"):
            assert ours.read(f"archive/{name}") == torchs.read(f"torchs/{name}")


@pytest.mark.parametrize("tokens", [300_000, 1_200_000])
def test_files_beyond_four_gib_are_zip64(tmp_path: Path, tokens: int) -> None:
    """Sparse: 300,000 tokens put places beyond 32 bits, 1,200,000 also a plane's own size."""
    shape = Shape(h.PLANES, 2048, "bfloat16")
    path = tmp_path / "x.part"
    laid = v1.lay_out(path, np.zeros(tokens, np.int32), np.ones(tokens, np.uint8), shape)
    assert path.stat().st_size == laid.bytes > 1 << 32
    v1.complete(path, laid, laid.crcs | dict.fromkeys(shape.planes, 0), shape)
    crcs, places = v1.check(path, tokens, shape)
    assert {n: crcs[n] for n in laid.crcs} == laid.crcs
    assert [places[p.name][0] for p in laid.planes] == [p.offset for p in laid.planes]
    with path.open("r+b") as f:
        f.seek(laid.planes[-1].offset + (tokens - 1) * laid.planes[-1].row_stride)
        f.write(torch.full((2048,), 3.0, dtype=torch.bfloat16).view(torch.uint8).numpy().tobytes())
    body = v1.load(path, shape)
    assert body["planes"][-1][-1].eq(3).all()
    assert body["loss_mask"][-1] == 1


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


@pytest.mark.parametrize("name", ["speculators_v1", "specforge"])
def test_unzip_proves_a_file_and_finds_a_flipped_bit(tmp_path: Path, name: str) -> None:
    """Info-ZIP's own ``unzip -t`` where the machine has it, and Python's."""
    form = formats.get(name)
    path = tmp_path / "x.pt"
    h.sample_file(path, [1] * 19, [1] * 19, h.states(19), form)

    def tools_say() -> list[bool]:
        commands = [[sys.executable, "-m", "zipfile", "-t", str(path)]]
        commands += [["unzip", "-tqq", str(path)]] if shutil.which("unzip") else []
        done = [subprocess.run(command, capture_output=True, text=True) for command in commands]
        return [one.returncode == 0 and "corrupted" not in one.stdout for one in done]

    assert all(tools_say())
    place = form.planes(path, 19, h.SHAPE)[1]
    with path.open("r+b") as f:
        f.seek(place.offset + 7)
        byte = f.read(1)[0]
        f.seek(place.offset + 7)
        f.write(bytes([byte ^ 1]))
    assert not any(tools_say())


@pytest.mark.parametrize("name", formats.names())
@pytest.mark.parametrize("tokens", [1, 19])
def test_checksums_are_of_what_was_captured_not_of_what_the_file_holds(tmp_path: Path, name: str, tokens: int) -> None:
    """A byte that goes wrong between the capture and the end of the sample is seen by whoever reads the file."""
    form = formats.get(name)
    ids, mask = np.arange(tokens, dtype=np.int32), np.ones(tokens, np.uint8)
    for spoiled in [None, *range(len(h.PLANES))]:
        path = tmp_path / f"{spoiled}.part"
        laid = form.lay_out(path, ids, mask, h.SHAPE)
        crcs = h.fill(path, laid, h.states(tokens))
        if spoiled is not None:
            plane = laid.planes[spoiled]
            with path.open("r+b") as f:
                f.seek(plane.offset + (tokens - 1) * plane.row_stride + 5)
                byte = f.read(1)[0]
                f.seek(-1, 1)
                f.write(bytes([byte ^ 16]))
        known = form.complete(path, laid, crcs, h.SHAPE)
        line = Published(0, tokens, path.name, laid.bytes, identity(ids, mask).hex(), known, 1, "hsx-1", 1.0)
        why = converted.file_wrong(tmp_path, line, form, h.SHAPE, True)
        assert ("does not match its checksum" in why) == (spoiled is not None), (spoiled, why)


@pytest.mark.parametrize("name", formats.names())
def test_every_flipped_bit_is_found_and_none_stops_verify(tmp_path: Path, name: str) -> None:
    """Around the tensors without reading them: a pickle or header that means other layers, shapes or dtypes."""
    form, small = formats.get(name), Shape(h.PLANES, 8, "bfloat16")
    ids, mask = np.arange(5, dtype=np.int32) + 3, np.array([0, 0, 1, 1, 1], np.uint8)
    path = tmp_path / "x"
    laid = form.lay_out(path, ids, mask, small)
    planes = {plane: crc32(bytes(crc_bytes(name, plane))) for plane in h.PLANES}
    known = form.complete(path, laid, laid.crcs | planes, small)
    line = Published(0, 5, "x", laid.bytes, identity(ids, mask).hex(), known, 1, "hsx-1", 1.0)
    assert converted.file_wrong(tmp_path, line, form, small, True) == ""
    good = path.read_bytes()
    data = {at for offset, size in form.check(path, 5, small)[1].values() for at in range(offset, offset + size)}
    for at in range(len(good)):
        path.write_bytes(good[:at] + bytes([good[at] ^ 1 << at % 8]) + good[at + 1 :])
        assert converted.file_wrong(tmp_path, line, form, small, at in data), (at, good[max(0, at - 9) : at + 9])


def crc_bytes(name: str, plane: str) -> int:
    """How many bytes the record of a plane has in a sample of 5 tokens and hidden size 8; they are all zero."""
    beside = {"speculators": 4, "speculators_v1": 1}.get(name, 1 if plane == "final" else 3)
    return 5 * 8 * 2 * beside


def test_storages_in_another_order_are_found(tmp_path: Path) -> None:
    """torch.load would give layer 1 as layer 6."""
    path = tmp_path / "x.pt"
    h.sample_file(path, [1] * 9, [1] * 9, h.states(9))
    data = bytearray(path.read_bytes())
    places = [data.index(b"X\1\0\0\0" + key + b"X\3\0\0\0cpu") + 5 for key in (b"1", b"3")]
    data[places[0]], data[places[1]] = data[places[1]], data[places[0]]
    path.write_bytes(data)
    assert len(torch.load(path, weights_only=True)["hidden_states"]) == 4
    with pytest.raises(ValueError, match="pickle"):
        v1.check(path, 9, h.SHAPE)


@pytest.mark.parametrize(("is_", "becomes"), [(b'"BF16"', b'"F16" '), (b"[9,4,64]", b"[4,9,64]")])
def test_a_safetensors_header_that_means_another_tensor_is_found(tmp_path: Path, is_: bytes, becomes: bytes) -> None:
    form = formats.get("speculators")
    path = tmp_path / "x.safetensors"
    h.sample_file(path, [1] * 9, [1] * 9, h.states(9), form)
    data = path.read_bytes()
    assert is_ in data
    path.write_bytes(data.replace(is_, becomes, 1))
    with pytest.raises(ValueError, match="header"):
        form.check(path, 9, h.SHAPE)


def test_another_samples_file_is_found_by_its_identity(tmp_path: Path) -> None:
    """ModelOpt's files name their sample."""
    form, path = formats.get("modelopt"), tmp_path / "x.pt"
    h.sample_file(path, [1] * 9, [1] * 9, h.states(9), form)
    known = identity(np.ones(9, np.int32), np.ones(9, np.uint8)).hex()
    assert form.check(path, 9, h.SHAPE) == form.check(path, 9, h.SHAPE, known)
    with pytest.raises(ValueError, match="pickle"):
        form.check(path, 9, h.SHAPE, "0" * 32)


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
    rows = [formats.Row(row, n, lambda: (np.zeros(1), np.zeros(1))) for row, n in ((2, 5), (10, 7))]
    v1.side_files(tmp_path, rows, {"layers": [1]})
    assert json.loads((tmp_path / "sample_lengths.json").read_text()) == {"2": 5, "10": 7}
    assert json.loads((tmp_path / "data_config.json").read_text()) == {"layers": [1]}
    assert not [p for p in tmp_path.iterdir() if p.name.endswith("pt")]


def test_specforge_file(tmp_path: Path) -> None:
    planes = h.states(6)
    sample = {"input_ids": torch.arange(6), "loss_mask": torch.ones(6, dtype=torch.long), "planes": planes}
    path = tmp_path / specforge.file_name(4321)
    assert path == tmp_path / "rows_4000-6000/data_4321.ckpt"
    fill.write_sample(specforge, path, sample, h.SHAPE)  # type: ignore[arg-type]
    body = torch.load(path, weights_only=True)
    assert body["aux_hidden_state"].shape == (1, 6, 3 * h.HIDDEN)
    assert torch.equal(body["aux_hidden_state"][0, :, h.HIDDEN : 2 * h.HIDDEN], planes[1])
    assert torch.equal(body["hidden_state"][0], planes[3])
    assert os.listdir(path.parent) == ["data_4321.ckpt"]
    assert path.stat().st_size < 20_000, "a slice took its whole base along"


def test_settings_name_what_can_be_made() -> None:
    assert formats.names() == ["modelopt", "specforge", "speculators", "speculators_v1"]
    for name in formats.names():
        assert formats.get(name).NAME == name == formats.primary([name]).NAME
    for wrong in ([], ["speculators_v1", "speculators_v1"], ["csv"]):
        with h.refuses(BadInput, "capture.formats", "speculators_v1"):
            formats.primary(wrong)
    with h.refuses(BadInput, "capture.formats", "put speculators first"):
        formats.of_run(["specforge", "speculators"])
    assert [f.NAME for f in formats.of_run(["speculators", "specforge"])] == ["speculators", "specforge"]


def test_importing_the_registry_is_light() -> None:
    import sys

    code = "import sys; import hsx_host.plan, hsx_host.handoff, hsx_host.convert; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
