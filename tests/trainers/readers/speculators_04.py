"""speculators 0.4: Eagle3SampleFileDataset, create_collate_fn."""

import importlib.metadata

import torch
from common import ARGS, tell
from speculators.train.data import Eagle3SampleFileDataset, create_collate_fn

folder, out, max_len = ARGS[0], ARGS[1], int(ARGS[2])
data = Eagle3SampleFileDataset(max_len, datapath=folder, hidden_states_dtype=torch.bfloat16)
rows, lengths = {}, {}
for i in range(len(data)):
    row = data.data[i].stem.split("_")[1]
    raw = data.standardize_fn(torch.load(data.data[i], mmap=True, weights_only=True))  # before its shift
    rows[row] = {
        "ids": raw["input_ids"],
        "mask": raw["loss_mask"],
        "aux": raw["hidden_states"],
        "last": raw["verifier_last_hidden_states"],
    }
    one = data[i]
    assert torch.equal(one["input_ids"], raw["input_ids"][1:])
    lengths[row] = data.approx_lengths[i]
batch = create_collate_fn(max_len)([data[i] for i in range(len(data))])
tell(
    out,
    rows,
    version=importlib.metadata.version("speculators"),
    lengths=lengths,
    batch={k: [list(v.shape), str(v.dtype)] for k, v in batch.items()},
)
