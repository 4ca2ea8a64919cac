"""speculators 0.7: SampleFileDataset (v1), ArrowDataset, CollateFn, and one training step of Eagle3DraftModel."""

import importlib.metadata
from pathlib import Path

import torch
from common import ARGS, draft, step, tell
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn, SampleFileDataset

folder, out, max_len, model_path, vocab = ARGS[0], ARGS[1], int(ARGS[2]), ARGS[3], ARGS[4]
layers = [int(k) for k in ARGS[5].split(",")]
data = SampleFileDataset(max_len, datapath=folder, hidden_states_dtype=torch.bfloat16)
rows, lengths, batch_of = {}, {}, []
for i in range(len(data)):
    one, row = data[i], Path(data.data[i]).stem.split("_")[1]
    rows[row] = {
        "ids": one["input_ids"],
        "mask": one["loss_mask"],
        "aux": one["hidden_states"],
        "last": one["verifier_last_hidden_states"],
    }
    lengths[row] = data.approx_lengths[i]
    batch_of.append(one)
hidden = batch_of[0]["verifier_last_hidden_states"].shape[-1]
batch = CollateFn(max_len, hidden, 3, torch.bfloat16, preprocess=shift_batch)(batch_of)
model = draft(Eagle3DraftModel, model_path, layers, vocab)
train, _ = Eagle3DraftModel.get_trainer_kwargs(ttt_steps=2, ttt_step_loss_decay=1.0, loss_fn="kl_div")
said = step(model, batch, **train)
tell(
    out,
    rows,
    version=importlib.metadata.version("speculators"),
    lengths=lengths,
    batch={k: [list(v.shape), str(v.dtype)] for k, v in batch.items() if isinstance(v, torch.Tensor)},
    step=said,
)
