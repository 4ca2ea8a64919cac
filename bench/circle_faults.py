"""Copies of a data set with one fault each, as a wrong extraction would have made it: files whole, checksums right."""

from __future__ import annotations

import json
import shutil
import zlib
from pathlib import Path
from typing import Any

import torch

from hsx_host import contract as c
from hsx_host import proof
from hsx_host.formats import speculators_v1

TEXT = {
    "layers": "layers off by one",
    "norm": "after-norm for before-norm",
    "rows": "shuffled rows",
}


def damage(dataset: Path, out: Path, fault: str, spec: c.RunSpec) -> Path:
    """Copy ``dataset`` to a folder below ``out`` with the fault in every sample; the copy.

    ``layers`` needs hidden states that were never captured: those of the model itself, one layer deeper.
    """
    copy = out / dataset.name
    shutil.copytree(dataset, copy, ignore=shutil.ignore_patterns("*.pt", "lock", "*.lock"))
    norm = proof.NextToken(spec.model.path, dataset / proof.NORM_FILE)
    deeper = _Deeper(spec) if fault == "layers" else None
    for manifest in sorted(copy.glob("shards/*/manifest.jsonl")):
        lines = [json.loads(line) for line in manifest.read_text().splitlines()]
        for line in lines:
            body = torch.load(dataset / line["file"], weights_only=True)
            planes = list(body["hidden_states"])
            if fault == "norm":
                planes[-1] = norm.normed(planes[-1])
            elif fault == "rows":
                order = torch.randperm(len(planes[0]), generator=torch.Generator().manual_seed(line["index"]))
                planes = [plane[order].contiguous() for plane in planes]
            elif deeper is not None:
                planes = [*deeper.planes(body["input_ids"]), planes[-1]]
            body["hidden_states"] = [plane.clone() for plane in planes]
            path = copy / line["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(body, path)
            line["bytes"] = path.stat().st_size
            line["crc32"] |= dict(zip(_names(spec), map(_crc, planes), strict=True))
        manifest.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    for name in ("sample_lengths.json", "data_config.json"):
        if (dataset / speculators_v1.FOLDER / name).exists():
            shutil.copy2(dataset / speculators_v1.FOLDER / name, copy / speculators_v1.FOLDER / name)
    return copy


def _names(spec: c.RunSpec) -> list[str]:
    return [*(f"layer_{k}" for k in spec.capture.layers), "final"]


def _crc(plane: Any) -> int:
    return zlib.crc32(plane.contiguous().view(torch.int16).numpy().tobytes())


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
