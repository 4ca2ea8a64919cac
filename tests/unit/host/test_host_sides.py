"""What readers find their samples by, beside the samples: faults are named, and the next hand-off writes it again."""

from __future__ import annotations

import os
import shutil
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import host_data as h
import pyarrow
import pytest

from hsx_host import contract as c
from hsx_host import convert, converted, formats, handoff, plan, training_check, verify
from hsx_host.errors import Refused

CONVERT = {"out": "", "source": "", "shards": "", "limit": 0, "min_tokens": 0, "max_tokens": 0, "approximate": False}


def exchange(folder: Path) -> None:
    one, other = folder / "hidden_states/hs_0.safetensors", folder / "hidden_states/hs_1.safetensors"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


def cut(folder: Path) -> None:
    """An Arrow stream that ends behind a batch is whole to its reader."""
    (file,) = folder.glob("data-*.arrow")
    with pyarrow.memory_map(str(file)) as source:
        table = pyarrow.ipc.open_stream(source).read_all()
    write(file, table.slice(0, len(table) - 1))


def other_ids(folder: Path) -> None:
    (file,) = folder.glob("data-*.arrow")
    with pyarrow.memory_map(str(file)) as source:
        table = pyarrow.ipc.open_stream(source).read_all()
    column = [[one + 1 for one in ids] for ids in table.column("input_ids").to_pylist()]
    at, kind = table.schema.get_field_index("input_ids"), table.schema.field("input_ids")
    write(file, table.set_column(at, kind, pyarrow.array(column, kind.type)))


def write(file: Path, table: pyarrow.Table) -> None:
    file.unlink()
    with pyarrow.OSFile(str(file), "wb") as out, pyarrow.ipc.new_stream(out, table.schema) as stream:
        stream.write_table(table)


def junk(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (file,) = folder.glob(name)
        file.unlink()
        file.write_bytes(b"junk")

    return spoil


FAULTS: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "exchanged names": ("speculators", exchange, "hs_0.safetensors is not the sample of row 0"),
    "a missing name": (
        "speculators",
        lambda f: (f / "hidden_states/hs_2.safetensors").unlink(),
        "hs_2.safetensors is m",
    ),
    "one name too many": (
        "speculators",
        lambda f: (f / "hidden_states/hs_99.safetensors").touch(),
        "hs_99.safetensors is",
    ),
    "another file's name": (
        "speculators",
        junk("hidden_states/hs_1.safetensors"),
        "hs_1.safetensors is not the sample",
    ),
    "no state.json": ("speculators", lambda f: (f / "state.json").unlink(), "state.json can't be read"),
    "no dataset_info": ("speculators", lambda f: (f / "dataset_info.json").unlink(), "dataset_info.json is missing"),
    "no arrow file": ("speculators", junk("data-*.arrow"), "can't be read"),
    "a cut arrow file": ("speculators", cut, "rows that are not the"),
    "lengths": ("speculators_v1", junk("sample_lengths.json"), "sample_lengths.json can't be read"),
    "no lengths": (
        "speculators_v1",
        lambda f: (f / "sample_lengths.json").unlink(),
        "sample_lengths.json can't be read",
    ),
    "other lengths": (
        "speculators_v1",
        lambda f: (f / "sample_lengths.json").write_text('{"0": 5}'),
        "does not hold the lengths",
    ),
}


def handed(root: Path, *names: str) -> tuple[c.RunSpec, Path]:
    """A data set of several shards with a gap in its rows, handed off."""
    lines = h.samples(6)
    spec = h.make_spec(root, h.write_lines(root / "d.jsonl", lines), formats=names)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec)
    if names[1:]:
        convert.run(spec, Namespace(format="", **CONVERT))
    handoff.run(spec, Namespace(window_ended=False))
    return spec, dataset


def verified(spec: c.RunSpec, *, deep: bool = False) -> c.VerifyReport:
    return verify.run(spec, Namespace(deep=deep, shard=None, window_ended=False))


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_and_the_next_hand_off_repairs_it(tmp_path: Path, fault: str) -> None:
    name, spoil, words = FAULTS[fault]
    spec, dataset = handed(tmp_path, name)
    folder = dataset / formats.get(name).FOLDER
    assert verified(spec, deep=True).ok
    assert handoff.is_current(dataset)
    spoil(folder)
    with pytest.raises(Refused, match=words) as e:
        verified(spec)
    assert "handoff writes it again" in str(e.value)
    assert not handoff.is_current(dataset), "else no run would hand off again"
    trained = replace(spec, training=c.TrainingSettings("t", ["true"], name, str(tmp_path / "t"), "python"))
    with h.refuses(Refused, "handoff", words):
        training_check.run(trained, Namespace(handoff="", manifest=""))
    handoff.run(spec, Namespace(window_ended=False))
    assert verified(spec, deep=True).ok
    assert handoff.is_current(dataset)


def test_deep_also_compares_ids_that_stand_beside_the_samples(tmp_path: Path) -> None:
    spec, dataset = handed(tmp_path, "speculators")
    other_ids(dataset / "speculators")
    with pytest.raises(Refused, match="holds another input_ids for row 0"):
        verified(spec, deep=True)


def test_a_derived_folder_is_looked_at_too_and_convert_repairs_it(tmp_path: Path) -> None:
    spec, dataset = handed(tmp_path, "speculators_v1", "speculators")
    exchange(dataset / "speculators")
    assert any("is not the sample of row 0" in why for why in converted.problems(dataset / "speculators", deep=False))
    with pytest.raises(Refused, match="convert writes it again"):
        verified(spec)
    with pytest.raises(Refused, match="run convert"):
        handoff.run(spec, Namespace(window_ended=False))
    convert.run(spec, Namespace(format="", **CONVERT))
    handoff.run(spec, Namespace(window_ended=False))
    assert verified(spec, deep=True).ok


def test_a_copy_that_knew_no_links_is_as_good(tmp_path: Path) -> None:
    spec, dataset = handed(tmp_path, "speculators")
    folder = dataset / "speculators/hidden_states"
    for file in list(folder.iterdir()):
        shutil.copyfile(file, folder / "x")
        os.replace(folder / "x", file)
    assert verified(spec, deep=True).ok


def test_side_files_of_an_earlier_hand_off_are_no_fault(tmp_path: Path) -> None:
    """More samples came since: the hand-off is not current, and the next one writes them."""
    data = h.write_lines(tmp_path / "d.jsonl", h.samples(6))
    spec = h.make_spec(tmp_path, data, formats=("speculators",))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    h.publish(spec)
    handoff.run(spec, Namespace(window_ended=False))
    h.write_lines(data, h.samples(7))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    dataset = h.publish(spec, [6])
    assert verified(spec, deep=True).ok
    assert not handoff.is_current(dataset)
