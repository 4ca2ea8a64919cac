"""The least client of the capture plugin that tests need: lays a raw file out, asks for it, reads the answer.

It writes the spool's documents by hand, so that these tests depend on the seam and not on the extraction client.
"""

from __future__ import annotations

import itertools
import json
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sglang_server import Server


def write_json(path: Path, kind: str, /, **body: Any) -> Path:
    temp = path.with_suffix(".tmp")
    temp.write_text(json.dumps({"type": kind, "version": 1, **body}))
    temp.rename(path)
    return path


def ids_crc(ids: Sequence[int]) -> int:
    return zlib.crc32(np.asarray(ids, dtype="<i8").tobytes())


@dataclass
class Client:
    """One extraction server's spool. ``hidden`` elements of bf16 make one row of one plane."""

    spool: Path
    layers: list[int]
    hidden: int
    num_blocks: int
    server: Server | None = None
    numbers: Iterator[int] = field(default_factory=itertools.count)
    requests: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def spec(self) -> Path:
        return self.spool / "spec.json"

    @property
    def row_bytes(self) -> int:
        return 2 * self.hidden

    def write_spec(self, **changes: Any) -> Path:
        """The CaptureSpec; the ring is small, so that a long prompt needs several slots and waits for them."""
        body: dict[str, Any] = {
            "plugin_id": "test", "spool": str(self.spool), "layers": self.layers, "num_blocks": self.num_blocks,
            "hidden_size": self.hidden, "dtype": "bfloat16", "writers": 2, "ring_bytes": 1 << 20, "rid_prefix": "hsx-",
        }  # fmt: skip
        return write_json(self.spec, "CaptureSpec", **{**body, **changes})

    def planes(self, tokens: int, layout: str, base: int = 64) -> list[dict[str, Any]]:
        """Row maps: ``planes`` = contiguous planes, ``rows`` = [seq, L+1, H], ``mixed`` = [seq, L*H] and [seq, H]."""
        names, row = [*map(str, self.layers), "final"], self.row_bytes
        if layout == "planes":
            return [{"name": n, "offset": base + i * tokens * row, "row_stride": row} for i, n in enumerate(names)]
        if layout == "rows":
            return [{"name": n, "offset": base + i * row, "row_stride": len(names) * row} for i, n in enumerate(names)]
        wide = len(self.layers) * row
        aux = [{"name": n, "offset": base + i * row, "row_stride": wide} for i, n in enumerate(names[:-1])]
        return [*aux, {"name": "final", "offset": base + tokens * wide, "row_stride": row}]

    def ask(self, ids: Sequence[int], layout: str = "planes", **changes: Any) -> str:
        """Lay out a file of the exact size and write the CaptureRequest; answers the rid. ``changes`` spoil it."""
        rid = f"hsx-{next(self.numbers):04d}"
        path = self.spool / f"{rid}.bin"
        with path.open("wb") as f:
            f.truncate(64 + len(ids) * self.row_bytes * (len(self.layers) + 1))
        body = {"rid": rid, "path": str(path), "tokens": len(ids), "ids_crc32": ids_crc(ids)}
        body = {**body, "planes": self.planes(len(ids), layout), **changes}
        self.requests[rid] = body
        write_json(self.spool / f"{rid}.json", "CaptureRequest", **body)
        return rid

    def post(self, ids: Sequence[int], rid: str) -> Any:
        assert self.server is not None
        return self.server.generate(ids, rid=rid)

    def record(self, rid: str, timeout: float = 30) -> dict[str, Any]:
        path, deadline = self.spool / f"{rid}.done.json", time.monotonic() + timeout
        while not path.exists():
            assert time.monotonic() < deadline, f"no record of {rid}"
            time.sleep(0.01)
        return dict(json.loads(path.read_text()))

    def tensor(self, rid: str) -> torch.Tensor:
        """The rows of the file through its row map: [planes, tokens, hidden] bf16."""
        body = self.requests[rid]
        raw = np.fromfile(body["path"], dtype=np.uint8)
        planes = []
        for p in body["planes"]:
            rows = [
                raw[o : o + self.row_bytes]
                for o in range(p["offset"], p["offset"] + body["tokens"] * p["row_stride"], p["row_stride"])
            ]
            planes.append(np.stack(rows))
        return torch.from_numpy(np.stack(planes)).view(torch.bfloat16)

    def capture(self, ids: Sequence[int], layout: str = "planes") -> tuple[torch.Tensor, dict[str, Any], int]:
        """Ask, post and wait: the rows, the record and the next token; fails where the record has an error."""
        rid = self.ask(ids, layout)
        answer = self.post(ids, rid)
        record = self.record(rid)
        assert record["error"] == "", record
        assert answer["meta_info"]["cached_tokens"] == 0
        return self.tensor(rid), record, answer["output_ids"][0]

    def ready(self) -> list[dict[str, Any]]:
        return [json.loads(p.read_text()) for p in sorted(self.spool.glob("ready-*.json"))]


class Reference:
    """Hugging Face's own forward pass of the same checkpoint, bf16 on the CPU."""

    def __init__(self, model: Path) -> None:
        import transformers

        self.model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
        self._before: torch.Tensor | None = None
        self.model.model.norm.register_forward_pre_hook(self._keep)

    def _keep(self, module: Any, args: tuple[torch.Tensor, ...]) -> None:
        self._before = args[0][0].detach().clone()

    def states(self, ids: Sequence[int]) -> tuple[list[torch.Tensor], torch.Tensor]:
        """``hidden_states[k]`` for k in 0..blocks-1, each [tokens, hidden], and the final before the norm."""
        with torch.no_grad():
            out = self.model(torch.tensor([list(ids)]), output_hidden_states=True, use_cache=False)
        assert self._before is not None
        return [h[0] for h in out.hidden_states[:-1]], self._before

    def next_logits(self, before_norm: torch.Tensor) -> torch.Tensor:
        """lm_head(norm(x)) of one row [hidden], float32 [vocab]."""
        with torch.no_grad():
            logits: torch.Tensor = self.model.lm_head(self.model.model.norm(before_norm[None]))[0].float()
        return logits


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    """Relative error in the Frobenius norm."""
    return float((got.float() - want.float()).norm() / want.float().norm())


def check(got: torch.Tensor, ids: Sequence[int], client: Client, reference: Reference) -> None:
    """Every plane is the asked one within bf16 rounding, and no other layer is nearer."""
    states, before = reference.states(ids)
    for plane, k in zip(got, client.layers, strict=False):
        errors = [error(plane, state) for state in states]
        assert errors[k] < 0.03, (k, errors)
        assert min(range(len(errors)), key=errors.__getitem__) == k, (k, errors)
    assert error(got[-1], before) < 0.03
    with torch.no_grad():
        after = reference.model.model.norm(before)
    assert error(got[-1], after) > 0.1, "the final hidden state is after the norm"
