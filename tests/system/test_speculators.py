"""speculators 0.7.0's own reader loads what real SGLang and hsx made, in an environment of its own."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import extraction_host
import pytest
from extraction_host import LAYERS, Host

from hsx_demo import trainer_env

LENGTHS = [19, 1, 64, 65, 130, 7, 40, 22]
MAX_LEN = 256

# Runs under the environment with speculators; prints what its reader and collate function gave.
READER = """
import hashlib, importlib.metadata, json, sys
from pathlib import Path
import torch
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn, SampleFileDataset

folder, max_len, hidden, layers = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
data = SampleFileDataset(max_len, datapath=folder, hidden_states_dtype=torch.bfloat16)

def sha(t):
    return hashlib.sha256(t.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()

samples = {}
for i in range(len(data)):
    one = data[i]
    samples[Path(data.data[i]).stem.split("_")[1]] = {
        "length": data.approx_lengths[i],
        "lengths": one["lengths"].tolist(),
        "ids": one["input_ids"].tolist(),
        "mask": one["loss_mask"].tolist(),
        "shape": list(one["hidden_states"].shape),
        "aux": [sha(p) for p in one["hidden_states"].split(hidden, dim=-1)],
        "last": sha(one["verifier_last_hidden_states"]),
    }
batch = CollateFn(max_len, hidden, layers, torch.bfloat16, preprocess=shift_batch)([data[i] for i in range(3)])
print(json.dumps({
    "version": importlib.metadata.version("speculators"),
    "samples": samples,
    "batch": {k: [list(v.shape), str(v.dtype)] for k, v in batch.items()},
    "documents": batch["document_ids"][0].tolist(),
    "in_batch": [len(data[i]["input_ids"]) for i in range(3)],
}))
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny_qwen3: Path) -> Host:
    """A whole data set, handed off. The host is borrowed for it and given back."""
    root = tmp_path_factory.mktemp("speculators")
    data = extraction_host.write_data(root / "chat.jsonl", LENGTHS, seed=11)
    spec = extraction_host.spec_of(root, tiny_qwen3, data, layers=[1, 3, 5])
    host = Host(root, spec)
    host.verb("plan")
    host.verb("acquire")
    try:
        host.verb("serve", "extraction")
        host.verb("extract", "--shard", "0")
        host.verb("handoff")
    finally:
        host.verb("serve", "stopped")
        host.verb("release", "--abandon")
    return host


def test_speculators_reads_every_sample(made: Host) -> None:
    import hashlib

    import torch

    handoff = json.loads((made.dataset / "handoff.json").read_text())
    folder, hidden = handoff["formats"]["speculators_v1"], 64
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [str(trainer_env.python("speculators-0.7")), "-c", READER, folder, str(MAX_LEN), str(hidden), str(len(LAYERS))],
        capture_output=True, text=True, env=env, cwd=made.root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert said["version"] == "0.7.0"
    assert sorted(said["samples"], key=int) == [str(i) for i in range(len(LENGTHS))]

    def sha(tensor: Any) -> str:
        return hashlib.sha256(tensor.contiguous().view(torch.int16).numpy().tobytes()).hexdigest()

    for row, line in enumerate(Path(made.spec.data.path).read_text().splitlines()):
        wanted, got = json.loads(line), said["samples"][str(row)]
        ours = torch.load(made.dataset / f"v1/data_{row}.pt", weights_only=True)["hidden_states"]
        assert (got["ids"], got["mask"]) == (wanted["input_ids"], wanted["loss_mask"])
        assert (got["length"], got["lengths"]) == (LENGTHS[row], [LENGTHS[row]])
        assert got["shape"] == [LENGTHS[row], 3 * hidden]
        assert got["aux"] == [sha(t) for t in ours[:3]], "the layers are not in ascending order"
        assert got["last"] == sha(ours[3])
    batch = said["batch"]
    assert batch["hidden_states"] == [[1, MAX_LEN, 3 * hidden], "torch.bfloat16"]
    assert batch["verifier_last_hidden_states"] == [[1, MAX_LEN, hidden], "torch.bfloat16"]
    assert batch["loss_mask"][0] == batch["input_ids"][0] == [1, MAX_LEN]
    inside = [d for d in said["documents"] if d >= 0]
    lengths = [inside.count(d) for d in sorted(set(inside))]
    assert lengths == [n - 1 for n in said["in_batch"] if n > 1]  # its shift drops one row of each
