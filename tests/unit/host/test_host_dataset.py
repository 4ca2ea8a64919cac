"""The data file and the model folder: every kind of bad line, and every kind of bad file."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import host_data as h
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsx_host import rows
from hsx_host.dataset import Reject, Sample, identity, read_samples
from hsx_host.errors import BadInput
from hsx_host.model_facts import longest_prompt, read_model, weights_sha256


def read(path: Path) -> list[Sample | Reject]:
    return list(read_samples(path, vocab_size=h.VOCAB, longest=20))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"input_ids": [1, 2', "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("", "empty"),
        ("  ", "empty"),
        ("[1, 2]", "not an object but list"),
        ('{"loss_mask": [1]}', "input_ids is missing"),
        ('{"input_ids": [1]}', "loss_mask is missing"),
        (h.line([]), "input_ids is empty"),
        ('{"input_ids": "12", "loss_mask": [1]}', "not a list but str"),
        ('{"input_ids": [1], "loss_mask": null}', "not a list but NoneType"),
        (h.line([1, 2.0]), "input_ids[1] = 2.0 is not a whole number"),
        (h.line([True, 2]), "input_ids[0] = True is not a whole number"),
        (h.line(["1"]), "input_ids[0] = 1 is not a whole number"),
        (h.line([[1]]), "input_ids[0]"),
        (h.line([1, None]), "input_ids[1] = None"),
        (h.line([1, h.VOCAB]), f"input_ids[1] = {h.VOCAB} lies outside the vocabulary of {h.VOCAB}"),
        (h.line([-1]), "input_ids[0] = -1 lies outside"),
        (h.line([10**30]), "lies outside the vocabulary"),
        (h.line([1, 2], [1]), "loss_mask has 1 values for 2 tokens"),
        (h.line([1, 2], [1, 1, 0]), "loss_mask has 3 values for 2 tokens"),
        (h.line([1, 2], [1, 2]), "loss_mask[1] = 2 is neither 0 nor 1"),
        (h.line([1, 2], [True, 1]), "loss_mask[0] = True"),
        (h.line([1, 2], [0.0, 1]), "loss_mask[0] = 0.0"),
        (h.line([1, 2], [1, -1]), "loss_mask[1] = -1"),
        (h.line([1] * 21), "21 tokens are more than the 20 that the server takes"),
    ],
)
def test_bad_line_is_a_reject_with_its_row(tmp_path: Path, text: str, reason: str) -> None:
    found = read(h.write_lines(tmp_path / "d.jsonl", [h.line([1]), text, h.line([2])]))
    assert [r.row for r in found] == [0, 1, 2]
    assert isinstance(found[0], Sample)
    assert isinstance(found[2], Sample)
    assert isinstance(found[1], Reject)
    assert reason in found[1].reason


@pytest.mark.parametrize("name", ["d.jsonl", "d.jsonl.gz"])
def test_good_lines_as_they_stand(tmp_path: Path, name: str) -> None:
    found = read(h.write_lines(tmp_path / name, [h.line([5, 0, h.VOCAB - 1], [0, 1, 0]), h.line([7] * 20)]))
    first = found[0]
    assert isinstance(first, Sample)
    assert (first.ids.tolist(), first.mask.tolist()) == ([5, 0, h.VOCAB - 1], [0, 1, 0])
    assert (first.ids.dtype, first.mask.dtype) == (np.int32, np.uint8)
    assert len(found) == 2


def test_last_line_without_newline_counts(tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    path.write_text(h.line([1]) + "\n" + h.line([2]))
    assert len(read(path)) == 2


def test_a_line_beyond_the_limit_is_a_reject(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 100)
    path = h.write_lines(tmp_path / "d.jsonl", [h.line([1]), " " * 1000, h.line([2])])
    found = read(path)
    assert [type(r) for r in found] == [Sample, Reject, Sample]
    assert found[2].row == 2


def test_identity_is_of_what_would_be_extracted(tmp_path: Path) -> None:
    same = ['{"input_ids":[1,2],"loss_mask":[0,1]}', '{ "loss_mask": [0, 1], "input_ids": [1, 2], "x": "y" }']
    other = [h.line([1, 2], [1, 1]), h.line([1, 3], [0, 1]), h.line([1, 2, 0], [0, 1, 0])]
    found = [s.hash for s in read(h.write_lines(tmp_path / "d.jsonl", [*same, *other])) if isinstance(s, Sample)]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    assert len(found[0]) == 16
    assert found[0] == identity(np.array([1, 2], np.int32), np.array([0, 1], np.uint8))


def test_memory_stays_flat(tmp_path: Path) -> None:
    path = h.write_lines(tmp_path / "d.jsonl.gz", [h.line([3] * 15)] * 20_000)
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_samples(path, vocab_size=h.VOCAB, longest=20)) == 20_000
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()


def bad_files(folder: Path) -> dict[str, tuple[Path, str]]:
    (folder / "empty.jsonl").write_text("")
    (folder / "folder.jsonl").mkdir()
    (folder / "no.jsonl.gz").write_bytes(b"not gzip at all\n")
    (folder / "cut.jsonl.gz").write_bytes(gzip.compress(b"".join(b'{"a": %d}\n' % i for i in range(9999)))[:-500])
    (folder / "d.csv").write_text("1,2\n")
    return {
        "missing": (folder / "none.jsonl", "can't be read"),
        "empty": (folder / "empty.jsonl", "empty"),
        "folder": (folder / "folder.jsonl", "can't be read"),
        "no gzip": (folder / "no.jsonl.gz", "gzip"),
        "cut gzip": (folder / "cut.jsonl.gz", "gzip"),
        "another ending": (folder / "d.csv", ".jsonl"),
    }


@pytest.mark.parametrize("kind", ["missing", "empty", "folder", "no gzip", "cut gzip", "another ending"])
def test_bad_file_names_the_field(tmp_path: Path, kind: str) -> None:
    path, word = bad_files(tmp_path)[kind]
    with h.refuses(BadInput, "data.path", word, str(path)):
        read(path)


def test_model_facts_of_plain_and_nested_configs(tmp_path: Path) -> None:
    facts = read_model(h.make_model(tmp_path / "a"))
    assert (facts.num_blocks, facts.hidden_size, facts.vocab_size) == (h.BLOCKS, h.HIDDEN, h.VOCAB)
    assert (facts.context_length, facts.norm_eps, facts.tie_word_embeddings) == (h.CONTEXT, 1e-5, False)
    text = json.loads((tmp_path / "a/config.json").read_text())
    del text["architectures"]
    (tmp_path / "b").mkdir()
    nested = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text, "hidden_size": 3}
    (tmp_path / "b/config.json").write_text(json.dumps(nested))
    kimi = read_model(tmp_path / "b")
    assert (kimi.num_blocks, kimi.hidden_size, kimi.architecture) == (h.BLOCKS, h.HIDDEN, nested["architectures"][0])


@pytest.mark.parametrize("change", [{"num_hidden_layers": None}, {"vocab_size": True}, {"rms_norm_eps": "x"}])
def test_bad_config_names_the_field(tmp_path: Path, change: dict[str, Any]) -> None:
    with h.refuses(BadInput, "model.path", next(iter(change)).split("_")[0]):
        read_model(h.make_model(tmp_path / "m", **change))


def test_missing_or_broken_config(tmp_path: Path) -> None:
    with h.refuses(BadInput, "model.path", "config.json"):
        read_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with h.refuses(BadInput, "model.path", "not JSON"):
        read_model(tmp_path)


def test_other_weights_have_another_hash(tmp_path: Path) -> None:
    folder = h.make_model(tmp_path / "m")
    before = weights_sha256(folder)
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    assert weights_sha256(folder) != before


@pytest.mark.parametrize("changed", ["embed", "layers.1.q", "layers.2.q"])
def test_one_changed_tensor_of_many_is_another_hash(tmp_path: Path, changed: str) -> None:
    """A fine-tune of some tensors, wherever they lie in a large file."""
    tensors = {"embed": 3, "layers.1.q": 2, "layers.2.q": 2, "layers.3.q": 4, "norm": 3}
    made = {name: torch.zeros(mib << 20, dtype=torch.uint8) for name, mib in tensors.items()}
    save_file(made, tmp_path / "model.safetensors")
    before = weights_sha256(tmp_path)
    save_file(made | {changed: made[changed] + 1}, tmp_path / "model.safetensors")
    assert weights_sha256(tmp_path) != before


def test_weights_that_are_no_safetensors_are_told(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(bytes(64))
    with h.refuses(BadInput, "model.path", "weights can't be read"):
        weights_sha256(tmp_path)


def test_longest_prompt_follows_the_servers_flags(tmp_path: Path) -> None:
    from dataclasses import replace

    spec = h.make_spec(tmp_path, tmp_path / "d.jsonl")
    facts = read_model(spec.model.path)
    assert longest_prompt(facts, spec.extraction) == h.CONTEXT - 7
    flags = replace(spec.extraction, args=["--context-length", "300", "--max-total-tokens=200"])
    assert longest_prompt(facts, flags) == 193
    with h.refuses(BadInput, "extraction --context-length"):
        longest_prompt(facts, replace(spec.extraction, args=["--context-length", "many"]))
