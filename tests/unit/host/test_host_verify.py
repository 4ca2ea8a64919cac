"""The proof, verify and handoff, on data sets with every kind of fault."""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest
import torch
from safetensors.torch import save_file

from hsx_host import contract as c
from hsx_host import extract, handoff, norm, plan, proof, verify
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.head import find_head
from hsx_host.manifest import (
    Failed,
    Ledger,
    Published,
    damaged_path,
    note_damaged,
    published_lines,
    read_lines,
    rewrite,
)
from hsx_host.shards import ShardFiles


@pytest.fixture
def made(tmp_path: Path) -> tuple[c.RunSpec, Path]:
    """Ten published samples in three shards."""
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(10)), proof_samples=10)
    plan.run(spec, Namespace(dry_run=False, failed=False))
    return spec, h.publish(spec)


def check(spec: c.RunSpec, deep: bool = False, shards: list[int] | None = None, late: bool = False) -> c.VerifyReport:
    report: c.VerifyReport = verify.run(spec, Namespace(deep=deep, shard=shards, window_ended=late))
    return report


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0xFF
    path.write_bytes(data)


def place(path: Path, name: str) -> int:
    from hsx_host.formats import speculators_v1 as v1

    tokens = 5 + int(path.stem.split("_")[1])
    return v1.check(path, tokens, h.SHAPE)[1][name][0]


def test_a_whole_data_set(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    for deep in (False, True):
        report = check(spec, deep)
        assert (report.ok, report.samples, report.proved, report.problems) == (True, 10, 10, [])
        assert report.tokens == sum(5 + i for i in range(10))
        assert report.bytes == sum(p.stat().st_size for p in (dataset / "v1").glob("*.pt"))


@pytest.mark.parametrize("plane", ["input_ids", "layer_3", "loss_mask"])
def test_one_changed_byte_is_found_by_deep_only(made: tuple[c.RunSpec, Path], plane: str) -> None:
    spec, dataset = made
    path = dataset / "v1/data_7.pt"
    flip(path, place(path, plane) + 3)
    assert check(spec).ok
    with h.refuses(Refused, "manifest.jsonl", f"row 7: v1/data_7.pt: {plane} does not match its checksum"):
        check(spec, deep=True)


def test_cut_and_missing_files(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    (dataset / "v1/data_1.pt").unlink()
    (dataset / "v1/data_9.pt").write_bytes(b"")
    with h.refuses(Refused, "manifest.jsonl", "row 1 has no file", "row 9 has a file of 0 bytes", "2 are missing"):
        check(spec)


def test_another_samples_file_of_the_same_size(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    path = dataset / "v1/data_3.pt"
    path.unlink()
    h.sample_file(path, [1] * 8, [1] * 8, h.states(8, seed=99))
    with h.refuses(Refused, "manifest.jsonl", "row 3: v1/data_3.pt: its header has other checksums"):
        check(spec)


def test_samples_that_were_never_extracted(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    files = ShardFiles(dataset, 1)
    rewrite(files.manifest, [line for line in read_lines(files.manifest, Published)[0] if line.index != 6])
    (dataset / "v1/data_6.pt").unlink()
    with h.refuses(TryAgain, "manifest.jsonl", "1 are missing", "missing rows: 6"):
        check(spec)
    ledger: Ledger[Failed] = Ledger(files.failures)
    ledger.append(Failed(6, 11, "", "layer_3 is not finite", 3, 1.0))
    ledger.close()
    with h.refuses(TryAgain, "manifest.jsonl", "0 are missing, 1 failed", "row 6: layer_3 is not finite"):
        check(spec)
    with h.refuses(Refused, "data.name", "1 failed"):
        handoff.run(spec, Namespace(window_ended=False))
    assert not (dataset / "handoff.json").exists()


def test_only_the_shards_of_the_run(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    (dataset / "v1/data_9.pt").unlink()
    report = check(replace(spec, data=replace(spec.data, shards=[0, 1])))
    assert (report.ok, report.samples) == (True, 8)


@pytest.mark.parametrize("name", ["token_freq.pt", "data_77.pt", "x.ckpt", "deeper/y.pt"])
def test_a_stray_file_would_be_trained_on(made: tuple[c.RunSpec, Path], name: str) -> None:
    spec, dataset = made
    (dataset / "v1" / name).parent.mkdir(exist_ok=True)
    (dataset / "v1" / name).write_bytes(b"x")
    with h.refuses(Refused, "manifest.jsonl", f"v1/{name} is in no manifest"):
        check(spec)


def test_nothing_published(tmp_path: Path) -> None:
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(3)))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    with h.refuses(TryAgain, "manifest.jsonl", "missing rows: 0, 1, 2", "no sample is published"):
        check(spec)


def republish(dataset: Path, row: int, planes: list[Any]) -> None:
    """Other states under a row, with a manifest that agrees with them: only the proof can see it."""
    files = ShardFiles(dataset, row // 4)
    lines = read_lines(files.manifest, Published)[0]
    (line,) = [one for one in lines if one.index == row]
    path = dataset / line.file
    body = torch.load(path, weights_only=True)
    path.unlink()
    crcs = h.sample_file(path, body["input_ids"].numpy(), body["loss_mask"].numpy(), planes)
    rewrite(files.manifest, [replace(one, crc32=crcs) if one.index == row else one for one in lines])


@pytest.mark.parametrize("fault", ["last row lost", "another request's", "another plane"])
def test_the_proof_sees_what_checksums_do_not(made: tuple[c.RunSpec, Path], fault: str) -> None:
    spec, dataset = made
    planes = h.states(5 + 6, seed=6)
    if fault == "last row lost":
        planes[-1] = torch.cat([planes[-1][:1], planes[-1][:-1]])
    elif fault == "another request's":
        planes[-1] = h.states(5 + 6, seed=7)[-1]
    else:
        planes[-1] = planes[-2]
    republish(dataset, 6, planes)
    with h.refuses(Refused, "manifest.jsonl", "row 6: head(norm(final)) gives token"):
        check(spec, deep=True)


def prover(tmp_path: Path, head: Any, weight: Any, **config: Any) -> proof.NextToken:
    h.make_model(tmp_path / "m", **config)
    name = "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    save_file({name: head.bfloat16().contiguous(), "other.weight": torch.zeros(2)}, tmp_path / "m/model.safetensors")
    norm = tmp_path / "norm.safetensors"
    save_file({"weight": weight.bfloat16(), "eps": torch.tensor([1e-5], dtype=torch.float64)}, norm)
    return proof.NextToken(str(tmp_path / "m"), norm)


def test_norm_is_torchs_own(tmp_path: Path) -> None:
    weight = torch.randn(h.HIDDEN).bfloat16()
    ours = prover(tmp_path, torch.randn(9, h.HIDDEN), weight)
    x = (30 * torch.randn(50, h.HIDDEN)).bfloat16()
    theirs = torch.nn.functional.rms_norm(x.float(), (h.HIDDEN,), weight.float(), eps=1e-5)
    assert float((ours.normed(x).float() - theirs).norm() / theirs.norm()) < 0.004  # ours is rounded to bf16


def test_ties_are_bf16_wide_and_no_wider(tmp_path: Path) -> None:
    torch.manual_seed(0)
    h_ = torch.randn(h.HIDDEN)
    head = torch.randn(50, h.HIDDEN) * 0.1
    head[7] = h_ / h_.norm()
    head[8] = head[7] * (1 - 2**-9)  # closer than a logit's rounding
    head[9] = head[7] * 0.9
    ours = prover(tmp_path, head, torch.ones(h.HIDDEN))
    last = h_.bfloat16()
    exact, tied, wrong = ours.prove(last, 7), ours.prove(last, 8), ours.prove(last, 9)
    assert exact.ok
    assert tied.ok
    assert not wrong.ok
    assert "token 7, the server gave 9" in wrong.text.replace("gives token 7", "token 7")
    assert not ours.prove(last, 50).ok
    assert not ours.prove(last, -1).ok


def test_norm_left_out_or_doubled_fails(tmp_path: Path) -> None:
    """With a norm weight that is not flat, states after the norm don't prove as states before it."""
    torch.manual_seed(1)
    weight = torch.randn(h.HIDDEN).exp()
    ours = prover(tmp_path, torch.randn(3000, h.HIDDEN), weight)
    head = torch.from_numpy(ours.head.rows(0, ours.head.shape[0]))
    failed = 0
    for _ in range(20):
        before = (5 * torch.randn(h.HIDDEN)).bfloat16()
        token = int((head @ ours.normed(before).float()).argmax())
        assert ours.prove(before, token).ok
        failed += not ours.prove(ours.normed(before), token).ok
    assert failed >= 10


def test_head_by_index_tied_and_missing(tmp_path: Path) -> None:
    tied = prover(tmp_path / "a", torch.randn(9, h.HIDDEN), torch.ones(h.HIDDEN), tie_word_embeddings=True)
    assert tied.head.shape == (9, h.HIDDEN)
    assert find_head(tmp_path / "a/m")[1] == "model.embed_tokens.weight"
    folder = h.make_model(tmp_path / "b")
    (folder / "model.safetensors").rename(folder / "model-00002-of-00002.safetensors")
    names = {"x.weight": "model-00001-of-00002.safetensors", "language_model.lm_head.weight": "b.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    assert find_head(folder) == (folder / "b.safetensors", "language_model.lm_head.weight")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"x": "y"}}))
    with h.refuses(BadInput, "model.path", "lm_head.weight"):
        find_head(folder)


def test_another_norm_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spool").mkdir()
    (tmp_path / "set").mkdir()
    (tmp_path / "spool" / proof.NORM_FILE).write_bytes(b"one")
    with h.refuses(Refused, "model.path", "RMSNorm"):
        norm.keep_norm(tmp_path / "spool", "GemmaRMSNorm", tmp_path / "set")
    norm.keep_norm(tmp_path / "spool", "RMSNorm", tmp_path / "set")
    (tmp_path / "spool" / proof.NORM_FILE).write_bytes(b"two")
    with h.refuses(Refused, proof.NORM_FILE, "differs"):
        norm.keep_norm(tmp_path / "spool", "RMSNorm", tmp_path / "set")
    assert (tmp_path / "set" / proof.NORM_FILE).read_bytes() == b"one"


def test_handoff_is_the_document_and_names_every_engines_ids(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    result = handoff.run(spec, Namespace(window_ended=False))
    assert c.decode(c.HandoffResult, (dataset / "handoff.json").read_bytes()) == result
    assert (result.samples, result.layers, result.final.split(":")[0]) == (10, [1, 3, 6], "before_norm")
    assert result.formats == {"speculators_v1": str(dataset / "v1")}
    assert json.loads((dataset / "v1/sample_lengths.json").read_text()) == {str(i): 5 + i for i in range(10)}
    assert check(spec).ok, "side files are no strays"
    assert handoff.run(spec, Namespace(window_ended=False)) == result
    assert result.profile == "tiny"
    assert f"--data-path {dataset}/v1 --legacy-data --target-layer-ids 1 3 6" in result.commands["speculators_0.7"]
    assert "--format specforge" in result.commands["convert_specforge"], "a format that is not there is to be made"


def test_a_plan_knows_whether_what_is_published_was_handed_off(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    assert not plan.run(spec, Namespace(dry_run=False, failed=False)).handed_off
    handoff.run(spec, Namespace(window_ended=False))
    assert plan.run(spec, Namespace(dry_run=False, failed=False)).handed_off
    republish(dataset, 2, h.states(7, seed=50))
    assert not plan.run(spec, Namespace(dry_run=False, failed=False)).handed_off
    (dataset / "handoff.json").write_text("{}")
    assert not plan.run(spec, Namespace(dry_run=False, failed=False)).handed_off


def test_a_handoff_reads_each_manifest_once(made: tuple[c.RunSpec, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    spec, _dataset = made
    read: list[Path] = []
    plain = verify.judged

    def counting(dataset: Path, path: Path, hashes: dict[int, bytes]) -> Any:
        read.append(path)
        return plain(dataset, path, hashes)

    monkeypatch.setattr(verify, "judged", counting)
    handoff.run(spec, Namespace(window_ended=False))
    assert len(read) == len(set(read)) > 1


def test_a_run_of_some_shards_hands_on_all_that_is_published(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    some = replace(spec, data=replace(spec.data, shards=[1]))
    assert handoff.run(some, Namespace(window_ended=False)).samples == 10
    assert len(json.loads((dataset / "v1/sample_lengths.json").read_text())) == 10


def test_a_damaged_file_of_another_shard_is_not_handed_on(made: tuple[c.RunSpec, Path]) -> None:
    """A trainer reads every file of the folder, whichever run's shard it belongs to."""
    spec, dataset = made
    some = replace(spec, data=replace(spec.data, shards=[1]))
    (line,) = [x for x in published_lines(ShardFiles(dataset, 0).manifest).values() if x.index == 2]
    note_damaged(damaged_path(ShardFiles(dataset, 0).manifest), [(line, "layer_3 does not match its checksum")])
    with h.refuses(Refused, "data.name", "row 2 was found damaged: layer_3"):
        handoff.run(some, Namespace(window_ended=False))
    assert check(some).ok, "what another run has to repair is no fault of this one's shards"


def test_what_the_window_left_is_no_fault_and_is_not_handed_on(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    (dataset / "shards/00000/manifest.jsonl").unlink()
    for row in range(4):
        (dataset / f"v1/data_{row}.pt").unlink()
    report = check(spec, late=True)
    assert (report.ok, report.samples, report.missing, report.failed) == (True, 6, 4, 0)
    with h.refuses(TryAgain, "--window-ended", "4 samples are left for the next run"):
        handoff.run(spec, Namespace(window_ended=True))
    with h.refuses(Refused, "data.name", "not whole"):
        handoff.run(spec, Namespace(window_ended=False))
    ledger: Ledger[Failed] = Ledger(ShardFiles(dataset, 0).failures)
    ledger.append(Failed(1, 6, "", "a reason", 3, 0.0))
    ledger.close()
    with h.refuses(TryAgain, "manifest.jsonl", "a reason"):
        check(spec, late=True)
    with h.refuses(Refused, "data.name", "a reason"):
        handoff.run(spec, Namespace(window_ended=True))


def test_one_hosts_shards_alone(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    (dataset / "shards/00000/manifest.jsonl").unlink()  # another host's, which has not begun
    for row in range(4):
        (dataset / f"v1/data_{row}.pt").unlink()
    assert check(spec, shards=[2, 1, 1]).samples == 6
    with h.refuses(TryAgain, "manifest.jsonl", "missing rows: 0, 1, 2, 3"):
        check(spec, shards=[0, 1])


def test_a_shard_whose_folder_is_gone_is_no_smaller_data_set(made: tuple[c.RunSpec, Path]) -> None:
    spec, dataset = made
    shutil.rmtree(dataset / "shards/00000")
    for row in range(4):
        (dataset / f"v1/data_{row}.pt").unlink()
    with h.refuses(Refused, "manifest.jsonl", "the plan has 10 samples"):
        check(spec)


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_no_token_is_proved_by_nothing(tmp_path: Path, value: float) -> None:
    ours = prover(tmp_path, torch.randn(9, h.HIDDEN), torch.ones(h.HIDDEN))
    verdict = ours.prove(torch.full((h.HIDDEN,), value).bfloat16(), 3)
    assert not verdict.ok
    assert "not finite, or all zero" in verdict.text


def test_disproved_samples_count_no_longer(made: tuple[c.RunSpec, Path]) -> None:
    """The next run must redo them: a shard that failed its proof is not done."""
    spec, dataset = made
    republish(dataset, 2, h.states(7, seed=50))
    with h.refuses(Refused, "shard", "row 2", "next-token proof failed"):
        extract.run(spec, Namespace(shard=0, stop_after=0.0))
    result = plan.run(spec, Namespace(dry_run=False, failed=False))
    assert (result.todo, [s.id for s in result.shards]) == (1, [0])
    assert "next-token proof" in read_lines(ShardFiles(dataset, 0).failures, Failed)[0][0].reason


def test_layer_ids_are_the_reference_table() -> None:
    ids = handoff.layer_ids([3, 31, 59], "KimiK25ForConditionalGeneration")
    assert ids["sglang_draft_config"] == ids["sglang_deepseek_setter_since_25454"] == [3, 31, 59]
    assert ids["sglang_deepseek_setter_before_25454"] == [2, 30, 58]
    assert handoff.layer_ids([3, 31, 59], "Qwen3ForCausalLM")["sglang_draft_config"] == [2, 30, 58]
    assert ids["vllm"] == ids["hsx"] == ids["sglang_layers_to_capture"] == [3, 31, 59]
    assert ids["sglang_llama_setter"] == ids["specforge"] == ids["speculators_0.4_layer_ids"] == [2, 30, 58]
    assert all(len(v) == 3 for v in ids.values()), "the final is never among them"


def test_manifest_hash_changes_with_a_sample(made: tuple[c.RunSpec, Path]) -> None:
    _spec, dataset = made
    before = handoff.manifest_sha256(dataset)
    republish(dataset, 2, h.states(7, seed=50))
    assert handoff.manifest_sha256(dataset) != before
