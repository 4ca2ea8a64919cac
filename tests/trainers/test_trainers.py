"""Each trainer's own reader loads what real SGLang and hsx made; every value against Hugging Face."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import models
import pytest
from extraction_host import LAYERS, Host
from reference import Reference
from safetensors.torch import load_file
from trainer_data import LENGTHS, MASKLESS, REJECT

from hsx_demo import trainer_env

READERS = Path(__file__).with_name("readers")
MAX_LEN, HIDDEN = 512, 96
NEAR, FAR = 0.05, 0.15  # relative error of bf16 through eight loud random blocks; another layer is off by 0.3 and more


def run(trainer: str, script: Path | str, *args: str, cwd: Path) -> str:
    """Run a script under a trainer's Python, with nothing of hsx on its path; its stdout, or AssertionError."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    env |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": "", "WANDB_MODE": "offline"}
    done = subprocess.run(
        [str(trainer_env.python(trainer)), str(script), *args],
        capture_output=True,
        text=True,
        env=env,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


def loaded(trainer: str, made: Host, tmp_path: Path, form: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a trainer's reader says, and the tensors that it loaded."""
    folder = json.loads((made.dataset / "handoff.json").read_text())["formats"][form]
    name = trainer.replace(".", "").replace("-", "_")
    out = run(trainer, READERS / f"{name}.py", folder, str(tmp_path), str(MAX_LEN), *more, cwd=tmp_path)
    return json.loads(out.splitlines()[-1]), load_file(tmp_path / "loaded.safetensors")


def check_values(tensors: dict[str, Any], samples: dict[int, Any], model: Path, norm: str) -> None:
    """Ids and masks are the data file's; planes are Hugging Face's layers in order, and no neighbour of theirs."""
    reference = Reference(model)
    assert {int(name.split(".")[0]) for name in tensors} == set(samples)
    for row, sample in samples.items():
        ids = tensors[f"{row}.ids"]
        assert ids.tolist() == sample["input_ids"]
        assert tensors[f"{row}.mask"].long().tolist() == sample["loss_mask"]
        layers, final = reference.states(ids)
        planes = tensors[f"{row}.aux"].split(HIDDEN, dim=-1)
        assert len(planes) == len(LAYERS)
        for k, plane in zip(LAYERS, planes, strict=True):
            assert Reference.off(plane, layers[k]) < NEAR, (row, k)
            assert Reference.off(plane, layers[k - 1]) > FAR, (row, k)
            assert Reference.off(plane, layers[k + 1]) > FAR, (row, k)
        before, after = final, layers[-1]
        wanted, other = (before, after) if norm == "before" else (after, before)
        assert Reference.off(tensors[f"{row}.last"], wanted) < NEAR, row
        assert Reference.off(tensors[f"{row}.last"], other) > FAR, row


def learned(said: dict[str, Any]) -> None:
    """A step of the trainer's own model: gradients everywhere, and the loss falls on the batch it was made on."""
    first, second = said["step"]["losses"]
    assert 0 < second < first
    assert said["step"]["without_gradient"] == []
    assert said["step"]["trained"] > 5


@pytest.fixture
def vocab(made: Host) -> str:
    return str(made.dataset / "vocab-64")


LAYERS_ARG = ",".join(map(str, LAYERS))
ROWS = {str(row): n for row, n in zip([r for r in range(9) if r != REJECT], LENGTHS, strict=True)}


def test_speculators_04(made: Host, samples: dict[int, Any], tiny_llama: Path, tmp_path: Path) -> None:
    said, tensors = loaded("speculators-0.4", made, tmp_path, "speculators_v1")
    assert (said["version"], said["lengths"]) == ("0.4.0", ROWS)
    assert said["batch"]["hidden_states"] == [[1, MAX_LEN, 3 * HIDDEN], "torch.bfloat16"]
    check_values(tensors, samples, tiny_llama, "before")


def test_speculators_07(made: Host, samples: dict[int, Any], tiny_llama: Path, tmp_path: Path, vocab: str) -> None:
    said, tensors = loaded("speculators-0.7", made, tmp_path, "speculators_v1", str(tiny_llama), vocab, LAYERS_ARG)
    assert (said["version"], said["lengths"]) == ("0.7.0", ROWS)
    assert said["batch"]["verifier_last_hidden_states"] == [[1, MAX_LEN, HIDDEN], "torch.bfloat16"]
    check_values(tensors, samples, tiny_llama, "before")
    learned(said)


def test_speculators_09(made: Host, samples: dict[int, Any], tiny_llama: Path, tmp_path: Path, vocab: str) -> None:
    said, tensors = loaded("speculators-0.9", made, tmp_path, "speculators", str(tiny_llama), vocab, LAYERS_ARG)
    assert (said["version"], said["lengths"]) == ("0.9.0", ROWS)
    assert (said["known"], said["corrupt"]) == (list(range(len(LENGTHS))), {})
    assert said["batch"]["hidden_states"] == [[1, MAX_LEN, 3 * HIDDEN], "torch.bfloat16"]
    assert said["vocab_is_theirs"], "our d2t and t2d are not those that speculators makes of our token_freq.pt"
    check_values(tensors, samples, tiny_llama, "before")
    learned(said)


def test_specforge(made: Host, samples: dict[int, Any], tiny_llama: Path, tmp_path: Path, vocab: str) -> None:
    said, tensors = loaded("specforge-0.2", made, tmp_path, "specforge", vocab, str(models.VOCAB))
    assert (said["version"], said["lengths"]) == ("0.2.0", ROWS)
    assert said["shapes"]["0"]["hidden_state"] == [[1, 130, 3 * HIDDEN], "torch.bfloat16"]
    assert said["batch"]["hidden_state"] == [len(LENGTHS), 130, 3 * HIDDEN]
    assert said["vocab_is_theirs"]
    counted: dict[str, int] = {}
    for one in samples.values():
        for token, mask in zip(one["input_ids"], one["loss_mask"], strict=True):
            if mask:
                counted[str(token)] = counted.get(str(token), 0) + 1
    assert said["counts"] == counted
    check_values(tensors, samples, tiny_llama, "after")


def test_modelopt(made: Host, samples: dict[int, Any], tiny_llama: Path, tmp_path: Path, vocab: str) -> None:
    said, tensors = loaded("modelopt-0.47", made, tmp_path, "modelopt", vocab)
    assert (said["version"], said["prenorm"]) == ("0.47.0", [False])
    assert said["batch"]["aux_hidden_states"] == [len(LENGTHS), MAX_LEN, 3 * HIDDEN]
    assert said["d2t"] == [[64], "torch.int64"]
    check_values(tensors, samples, tiny_llama, "after")
    assert not any(samples[MASKLESS]["loss_mask"])


@pytest.mark.parametrize("first", ["specforge", "speculators"])
def test_another_format_written_by_the_capture(
    made: Host, samples: dict[int, Any], tiny_llama: Path, tmp_path: Path, first: str, vocab: str
) -> None:
    """The capture itself fills rows side by side, and takes the final hidden state behind the norm where wanted."""
    from dataclasses import replace

    spec = replace(made.spec, capture=replace(made.spec.capture, formats=[first]))
    host = Host(tmp_path, replace(spec, host=replace(spec.host, output_root=str(tmp_path / "output"))))
    host.verb("plan")
    host.verb("acquire")
    try:
        host.verb("probe")
        host.verb("extract", "--shard", "0")
    finally:
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")
    host.verb("verify", "--deep")
    host.verb("handoff")
    if first == "specforge":
        _, tensors = loaded("specforge-0.2", host, tmp_path, first, vocab, str(models.VOCAB))
        check_values(tensors, samples, tiny_llama, "after")
    else:
        said, tensors = loaded("speculators-0.9", host, tmp_path, first, str(tiny_llama), vocab, LAYERS_ARG)
        check_values(tensors, samples, tiny_llama, "before")
        assert said["corrupt"] == {}
