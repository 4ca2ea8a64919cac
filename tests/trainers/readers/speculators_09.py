"""speculators 0.9: ArrowDataset with its own checks, CollateFn, and one training step of Eagle3DraftModel."""

import importlib.metadata
from pathlib import Path

import torch
from common import ARGS, draft, step, tell
from speculators.data_generation.offline import (
    check_hidden_states,
    find_corrupt_hidden_state_indices,
    get_existing_hidden_state_indices,
)
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import ArrowDataset, CollateFn
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution

folder, out, max_len, model_path, vocab = ARGS[0], ARGS[1], int(ARGS[2]), ARGS[3], ARGS[4]
layers = [int(k) for k in ARGS[5].split(",")]
data = ArrowDataset(max_len, datapath=folder, on_missing="raise")
states = Path(folder) / "hidden_states"
known = get_existing_hidden_state_indices(states)
corrupt = find_corrupt_hidden_state_indices(states, known)
rows, lengths, batch_of = {}, {}, []
for i in range(len(data)):
    check_hidden_states(data.transfer.get_cached(i), data.data[i]["input_ids"].tolist())
    one = data[i]
    row = str(int(data.data[i]["row"]))
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
frequencies = torch.load(Path(vocab) / "token_freq.pt", weights_only=True)
model = draft(Eagle3DraftModel, model_path, layers, vocab)
d2t, t2d = build_vocab_mappings_from_distribution(frequencies, model.draft_vocab_size, len(model.t2d))
said = step(model, batch, ttt_steps=2, loss_config=resolve_loss_config("kl_div", "eager"))
tell(
    out,
    rows,
    version=importlib.metadata.version("speculators"),
    lengths=lengths,
    known=known,
    corrupt=corrupt,
    batch={k: [list(v.shape), str(v.dtype)] for k, v in batch.items() if isinstance(v, torch.Tensor)},
    step=said,
    vocab_is_theirs=bool(torch.equal(d2t, model.d2t) and torch.equal(t2d, model.t2d)),
)
