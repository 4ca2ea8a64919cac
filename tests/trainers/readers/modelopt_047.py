"""ModelOpt 0.47: OfflineSupervisedDataset and EagleOfflineDataCollator."""

import importlib.metadata
from pathlib import Path

import torch
from common import ARGS, tell
from modelopt.torch.speculative.eagle.utils import EagleOfflineDataCollator, OfflineSupervisedDataset

folder, out, max_len, vocab = ARGS[0], ARGS[1], int(ARGS[2]), ARGS[3]
files = sorted(Path(folder).glob("*.pt"))
data = OfflineSupervisedDataset(files, answer_only_loss=True)
rows, prenorm = {}, set()
for i in range(len(data)):
    one = data[i]
    rows[files[i].stem.split("_")[1]] = {
        "ids": one["input_ids"],
        "mask": one["loss_mask"],
        "aux": one["aux_hidden_states"],
        "last": one["base_model_hidden_states"],
    }
    prenorm.add(one["base_hidden_prenorm"])
batch = EagleOfflineDataCollator(max_len)([data[i] for i in range(len(data))])
d2t = torch.load(Path(vocab) / "d2t.pt", weights_only=True)
tell(
    out,
    rows,
    version=importlib.metadata.version("nvidia-modelopt"),
    prenorm=sorted(prenorm),
    batch={k: list(v.shape) for k, v in batch["base_model_outputs"].items() if isinstance(v, torch.Tensor)},
    d2t=[list(d2t.shape), str(d2t.dtype)],
)
