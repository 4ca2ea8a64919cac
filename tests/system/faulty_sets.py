"""Copies of a data set with one fault each, as a wrong extraction would have made it: files whole, checksums right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from hsx_host import contract as c
from hsx_host import fill, formats, proof
from hsx_host.fingerprint import opened
from hsx_host.manifest import Published, newest, read_lines, rewrite
from hsx_host.norm import FinalNorm
from hsx_host.shards import ShardFiles, shard_ids

TEXT = {
    "layers": "layers off by one",
    "norm": "after-norm for before-norm",
    "rows": "shuffled rows",
}
#: What ``verify --reference`` must say of it.
NAMED = {"layers": "off by +1", "norm": "the final hidden state is after the norm", "rows": "in another order"}


def damage(out: Path, fault: str, spec: c.RunSpec) -> Path:
    """Copy the spec's data set to a folder below ``out`` with the fault in every sample; the copy.

    ``layers`` needs hidden states that were never captured: those of the model itself, one layer deeper.
    """
    dataset, meaning = opened(spec)
    form = formats.primary(meaning.formats)
    copy = out / dataset.name
    shutil.copytree(dataset, copy, ignore=shutil.ignore_patterns("*.pt", "lock", "*.lock"))
    norm = FinalNorm(dataset / proof.NORM_FILE, meaning.dtype)
    deeper = _Deeper(spec) if fault == "layers" else None
    for shard in shard_ids(dataset):
        lines = newest(read_lines(ShardFiles(dataset, shard).manifest, Published)[0])
        for row, line in lines.items():
            sample = form.load(dataset / line.file, meaning.shape)
            planes = list(sample["planes"])
            if fault == "norm":
                planes[-1] = norm.apply(planes[-1])
            elif fault == "rows":
                order = torch.randperm(len(planes[0]), generator=torch.Generator().manual_seed(row))
                planes = [plane[order] for plane in planes]
            elif deeper is not None:
                planes = [*deeper.planes(sample["input_ids"]), planes[-1]]
            size, crcs = fill.write_sample(form, copy / line.file, sample | {"planes": planes}, meaning.shape)
            lines[row] = replace(line, bytes=size, crc32=crcs)
        rewrite(ShardFiles(copy, shard).manifest, lines.values())
    return copy


class _Deeper:
    """Hidden states one layer deeper than the profile's, from the model by transformers."""

    def __init__(self, spec: c.RunSpec) -> None:
        import transformers

        self._layers = spec.capture.layers
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        model = transformers.AutoModelForCausalLM.from_pretrained(spec.model.path, dtype=torch.float32)
        self._model = model.eval().to(self._device)

    @torch.no_grad()
    def planes(self, ids: Any) -> list[Any]:
        states = self._model.model(ids.unsqueeze(0).to(self._device), output_hidden_states=True).hidden_states
        return [states[k + 1][0].to(torch.bfloat16).cpu() for k in self._layers]
