"""Count the tokens that are trained on, and map a draft vocabulary onto the target's, in each trainer's files.

Tokens count where the loss mask is 1. The draft vocabulary is the N most frequent (ties and what is missing: the lowest
ids), ascending: draft token i is target token i + d2t[i], and t2d says which target tokens it has. Source of rule and
files: speculators 0.9.0, train/vocab_mapping.py and train/cli.py; SpecForge 0.2.0, data/preprocessing.py; ModelOpt
0.47, plugins/hf_eagle.py.

Written to ``vocab-<N>/`` of the data set, apart from every format, whose reader might take them for samples:
  token_freq.pt                  {token: count}                  speculators --token-freq-path
  d2t-<N>.npy, t2d-<N>.npy       int64 [N], bool [vocabulary]    speculators --d2t-path, --t2d-path
  vocab_mapping/vocab_mapping.pt {d2t, t2d}                      SpecForge model.vocab_mapping_path
  d2t.pt                         int64 [N]                       ModelOpt data.draft_vocab_cache
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host import verify
from hsx_host.contract import RunSpec, VocabResult
from hsx_host.errors import BadInput
from hsx_host.fingerprint import opened
from hsx_host.shards import ShardFiles, read_input, shard_ids

HELP = "token frequencies over the loss mask, and the draft vocabulary's mapping"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--size", type=int, required=True, metavar="N", help="tokens of the draft vocabulary")


def run(spec: RunSpec, args: Namespace) -> VocabResult:
    """Count over what is published and write the files; BadInput where there is nothing to count, or N does not fit."""
    dataset, meaning = opened(spec)
    published = verify.census(spec, dataset, whole=True).published
    counts = np.zeros(meaning.vocab_size, np.int64)
    for shard in shard_ids(dataset):
        given = read_input(ShardFiles(dataset, shard))
        samples = (given.sample(i) for i in range(len(given)))
        counts += frequencies(((s.ids, s.mask) for s in samples if s.row in published), meaning.vocab_size)
    d2t, t2d = mapping(counts, args.size)
    folder = dataset / f"vocab-{args.size}"
    files = write(folder, counts, d2t, t2d)
    total, covered = int(counts.sum()), int(counts[t2d].sum())
    return VocabResult(
        path=str(folder),
        draft_vocab_size=args.size,
        target_vocab_size=meaning.vocab_size,
        tokens=total,
        different=int((counts > 0).sum()),
        covered=round(covered / total, 6),
        files=files,
    )


def frequencies(samples: Iterable[tuple[NDArray[Any], NDArray[Any]]], vocab_size: int) -> NDArray[np.int64]:
    """How often each token stands where the mask is 1, int64 [vocab_size].

    :param samples: ids and mask, integers [n] each.
    """
    counts = np.zeros(vocab_size, np.int64)
    for ids, mask in samples:
        counts += np.bincount(ids[mask.astype(bool)], minlength=vocab_size)
    return counts


def mapping(counts: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """``d2t`` int64 [size] (offsets) and ``t2d`` bool [vocabulary].

    :raises BadInput: where ``size`` is beyond the vocabulary, or no token is trained on.
    """
    if not 1 <= size <= len(counts):
        raise BadInput(
            f"the target's vocabulary has {len(counts)} tokens", field="--size", value=size,
            fix=f"a number from 1 to {len(counts)}",
        )  # fmt: skip
    if not counts.any():
        raise BadInput(
            "no token of the data set is trained on: every loss mask is 0", field="data.path", fix="look at loss_mask"
        )
    chosen = np.sort(np.lexsort((np.arange(len(counts)), -counts))[:size]).astype(np.int64)
    t2d = np.zeros(len(counts), np.bool_)
    t2d[chosen] = True
    return chosen - np.arange(size, dtype=np.int64), t2d


def write(folder: Path, counts: NDArray[np.int64], d2t: NDArray[np.int64], t2d: NDArray[np.bool_]) -> dict[str, str]:
    """Every trainer's files, each whole or not at all; paths by what they are called in the hand-off."""
    import torch

    size = len(d2t)
    (folder / "vocab_mapping").mkdir(parents=True, exist_ok=True)
    freq = {int(t): int(counts[t]) for t in np.flatnonzero(counts)}
    d, t = torch.from_numpy(d2t), torch.from_numpy(t2d)
    made: dict[str, tuple[Path, Callable[[Any], None]]] = {
        "token_freq": (folder / "token_freq.pt", lambda f: torch.save(freq, f)),
        "d2t": (folder / f"d2t-{size}.npy", lambda f: np.save(f, d2t)),
        "t2d": (folder / f"t2d-{size}.npy", lambda f: np.save(f, t2d)),
        "specforge": (folder / "vocab_mapping" / "vocab_mapping.pt", lambda f: torch.save({"d2t": d, "t2d": t}, f)),
        "modelopt": (folder / "d2t.pt", lambda f: torch.save(d, f)),
    }
    for path, save in made.values():
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        with temporary.open("wb") as f:
            save(f)
            f.flush()
            os.fsync(f.fileno())
        temporary.replace(path)
    return {name: str(path) for name, (path, _) in made.items()}
