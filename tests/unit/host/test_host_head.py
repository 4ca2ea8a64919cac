"""The head without torch: read block by block, rounded as torch rounds, and small in memory."""

from __future__ import annotations

import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import host_data as h
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from hsx_host import contract, fingerprint, head, plan, proof, state
from hsx_host.errors import BadInput, Refused

KINDS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


def model(folder: Path, weight: torch.Tensor) -> Path:
    h.make_model(folder)
    save_file({"a.weight": torch.ones(3), "lm_head.weight": weight}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_the_tensors_own(tmp_path: Path, kind: str) -> None:
    weight = torch.randn(50, 24).to(KINDS[kind])
    found = head.Head(model(tmp_path / "m", weight))
    assert (found.shape, found.dtype) == ((50, 24), kind)
    for first, end in ((0, 50), (7, 8), (49, 50)):
        assert torch.equal(torch.from_numpy(found.rows(first, end)), weight[first:end].float())


def test_other_dtypes_and_cut_files_are_refused(tmp_path: Path) -> None:
    with h.refuses(Refused, "model.path", "stored as F64"):
        head.Head(model(tmp_path / "m", torch.zeros(3, 4, dtype=torch.float64)))
    found = head.Head(model(tmp_path / "n", torch.randn(50, 24).bfloat16()))
    with (tmp_path / "n/model.safetensors").open("r+b") as f:
        f.truncate(900)
    with pytest.raises(OSError, match="ends inside the head"):
        found.rows(0, 50)
    (tmp_path / "n/model.safetensors").write_bytes(b"\0" * 64)
    with h.refuses(BadInput, "model.path", "header of 0 bytes"):
        head.Head(tmp_path / "n")


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounding_is_torchs(dtype: str) -> None:
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    halves = halves[halves.isfinite() & (halves.abs() < 6e4)]  # every bf16 value, and the ties between neighbours
    x = torch.cat([halves, halves * (1 + 2**-9), torch.randn(10_000), torch.tensor([0.0, -0.0, 1e-30])])
    theirs = x.to(getattr(torch, dtype)).float()
    assert torch.equal(torch.from_numpy(head.rounded(x.numpy(), dtype)), theirs)


def test_blocks_and_samples_together_prove_as_each_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(h.VOCAB, h.HIDDEN).bfloat16()
    norm = tmp_path / "norm.safetensors"
    save_file(
        {"weight": torch.randn(h.HIDDEN).exp().bfloat16(), "eps": torch.tensor([1e-5], dtype=torch.float64)}, norm
    )
    prover = proof.NextToken(str(model(tmp_path / "m", weight)), norm)
    last = torch.randn(6, h.HIDDEN).bfloat16()
    right = (weight.float() @ prover.normed(last).float().T).argmax(0).tolist()
    tokens = [*right[:3], (right[3] + 1) % h.VOCAB, h.VOCAB, right[5]]
    last[5] = float("nan")
    alone = [prover.prove(row, token) for row, token in zip(last, tokens, strict=True)]
    assert [v.ok for v in alone] == [True, True, True, False, False, False]
    monkeypatch.setattr(proof, "_BLOCK_BYTES", 7 * prover.head.row_bytes)  # 300 rows are no multiple of 7
    assert [v.ok for v in prover.prove_rows(last.float().numpy(), tokens)] == [v.ok for v in alone]


PROVE = r"""
import re, sys
from hsx_host import contract, extract, fingerprint, manifest, proof, shards
spec = contract.decode(contract.RunSpec, open(sys.argv[1]).read())
dataset, meaning = fingerprint.opened(spec)
lines = manifest.read_lines(shards.ShardFiles(dataset, 0).manifest, manifest.Published)[0]
print(proof.prove_published(spec.model.path, dataset, meaning, lines))
peak = re.search(r"VmHWM:\s+(\d+) kB", open("/proc/self/status").read())  # getrusage counts what stood before exec
print("torch" in sys.modules, int(peak[1]) // 1024)
"""


def test_a_shards_proof_needs_no_torch_and_little_memory(tmp_path: Path) -> None:
    """With a head of 400 MB: it is read in blocks, never whole."""
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(4)))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    h.publish(spec)
    small = head.Head(Path(spec.model.path)).rows(0, h.VOCAB)
    rows = 400_000_000 // (2 * h.HIDDEN)
    large = torch.zeros(rows, h.HIDDEN, dtype=torch.bfloat16)
    large[: h.VOCAB] = torch.from_numpy(np.array(small)).bfloat16()
    save_file({"lm_head.weight": large}, Path(spec.model.path) / "model.safetensors")
    folder = next((tmp_path / "out").iterdir())
    meaning = fingerprint.semantics(spec)  # other weights are another data set: give the folder its name
    folder.rename(tmp_path / "out" / meaning.dataset_id)
    state.write_document(tmp_path / "out" / meaning.dataset_id / "dataset.json", meaning)
    (tmp_path / "spec.json").write_text(contract.encode(spec))
    done = subprocess.run(
        [sys.executable, "-c", PROVE, str(tmp_path / "spec.json")], capture_output=True, text=True, check=True
    )
    verdict, facts = done.stdout.splitlines()
    assert verdict.startswith("('4 of 4 next tokens")
    torch_is_there, megabytes = facts.split()
    assert torch_is_there == "False"
    assert int(megabytes) < 300
