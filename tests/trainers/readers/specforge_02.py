"""SpecForge 0.2: OfflineManifestReader, the EAGLE3 normalizer and collator, its own count of tokens and mapping."""

import importlib.metadata
from pathlib import Path

import torch
from common import ARGS, tell
from specforge.algorithms.eagle3.data import normalize_offline_sample
from specforge.runtime.data_plane.feature_store import load_feature_file
from specforge.runtime.data_plane.offline_reader import OfflineManifestReader
from specforge.training.vocab_mapping import count_effective_feature_tokens

folder, out, max_len, vocab, size = ARGS[0], ARGS[1], int(ARGS[2]), ARGS[3], int(ARGS[4])
refs = OfflineManifestReader(folder, validate_files=True, max_len=max_len).read()
rows, lengths, shapes = {}, {}, {}
for ref in refs:
    path = Path(ref.feature_store_uri.removeprefix("file://"))
    raw, row = load_feature_file(str(path)), path.stem.split("_")[1]
    one = normalize_offline_sample(raw, max_len)
    rows[row] = {
        "ids": one["input_ids"][0],
        "mask": raw["loss_mask"],
        "aux": one["hidden_state"][0],
        "last": one["target"][0],
    }
    lengths[row] = ref.num_tokens
    shapes[row] = {k: [list(v.shape), str(v.dtype)] for k, v in one.items()}
counts = count_effective_feature_tokens(folder, target_vocab_size=size)
mapping = torch.load(Path(vocab) / "vocab_mapping" / "vocab_mapping.pt", weights_only=True)
try:
    from specforge.data.preprocessing import process_token_dict_to_mappings
    from specforge.data.utils import DataCollatorWithPadding

    features = [normalize_offline_sample(load_feature_file(r.feature_store_uri.removeprefix("file://")), max_len)
                for r in refs]  # fmt: skip
    batch = {k: list(v.shape) for k, v in DataCollatorWithPadding()(features).items() if v is not None}
    d2t, t2d = process_token_dict_to_mappings(counts.copy(), len(mapping["d2t"]), size)
    chosen = [set(torch.nonzero(t)[:, 0].tolist()) for t in (t2d, mapping["t2d"])]
    # among equally frequent tokens it takes whichever it met first: what the mapping covers is the same
    theirs = [len(d2t), sum(counts[i] for i in chosen[0])] == [len(mapping["d2t"]), sum(counts[i] for i in chosen[1])]
except ImportError as e:
    batch, theirs = {"missing": str(e)}, None
tell(
    out,
    rows,
    version=importlib.metadata.version("specforge"),
    lengths=lengths,
    shapes=shapes,
    batch=batch,
    counts={str(k): v for k, v in counts.items()},
    vocab_is_theirs=theirs,
)
