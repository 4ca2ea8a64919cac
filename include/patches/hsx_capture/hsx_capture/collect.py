"""The seam in the forward pass: which rows of a batch belong to whom, and on with them into the ring.

Runs on the scheduler's thread, so it does little: a look at the request ids, one gather a run of rows, one queue
entry a request. An exception here becomes the error record of the batch's requests; it never reaches the server.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hsx_capture import layout, spec
from hsx_capture.model import Target
from hsx_capture.ring import Ring
from hsx_capture.sample import Sample
from hsx_capture.writer import Chunk, Failure, Writers

log = logging.getLogger("hsx_capture")

# Samples are remembered until as many newer ones have come: rows of one that is done or failed are then ignored
# instead of starting it again, and what an aborted request leaves behind is bounded.
_REMEMBERED = 4096


@dataclass
class _Part:
    """Rows [first, first + rows) of the batch, the sample's rows from ``at`` on."""

    sample: Sample
    first: int
    rows: int
    at: int


class Collector:
    """Cuts each extend batch into the samples of its requests."""

    def __init__(self, wanted: spec.CaptureSpec, target: Target, ring: Ring, writers: Writers) -> None:
        self._spec, self._target, self._ring, self._writers = wanted, target, ring, writers
        self._spool = Path(wanted.spool)
        self._final: torch.Tensor | None = None
        self._samples: OrderedDict[str, Sample] = OrderedDict()

    def on_norm(self, module: Any, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook of the final norm: its second output is the summed residual; without one, its input."""
        self._final = output[1] if isinstance(output, tuple) else args[0]

    def on_logits(
        self,
        module: Any,
        input_ids: Any,
        hidden_states: Any,
        lm_head: Any,
        logits_metadata: Any,
        aux_hidden_states: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Before ``LogitsProcessor.forward``; answers None, so that its arguments stay as they are."""
        final, self._final = self._final, None
        rids = getattr(logits_metadata, "rids", None)
        if not rids or not logits_metadata.forward_mode.is_extend():
            return
        prefix = self._spec.rid_prefix
        mine = [i for i, rid in enumerate(rids) if isinstance(rid, str) and rid.startswith(prefix)]
        if not mine:
            return
        try:
            parts = self._account(rids, mine, logits_metadata)
            if parts:
                if self._spec.final == "after" and final is not None:
                    final = hidden_states  # what the head is about to see
                self._pass_on(parts, self._sources(aux_hidden_states, final, input_ids, logits_metadata), input_ids)
        except Exception as e:
            log.exception("a batch was not captured")
            for i in mine:
                self._fail(rids[i], f"{type(e).__name__}: {e}")

    def _account(self, rids: Sequence[str], mine: list[int], batch: Any) -> list[_Part]:
        lengths, prefixes = _ints(batch.extend_seq_lens_cpu), _ints(batch.extend_prefix_lens_cpu)
        starts, at = [], 0
        for n in lengths:
            starts.append(at)
            at += n
        parts = []
        for i in mine:
            sample = self._sample(rids[i])
            if sample is None or sample.closed or sample.answered:
                continue
            reason = sample.accept(prefixes[i], lengths[i])
            if reason:
                self._fail(sample.rid, reason)
            else:
                parts.append(_Part(sample, starts[i], lengths[i], prefixes[i]))
        return parts

    def _sample(self, rid: str) -> Sample | None:
        """The sample of a request id; None for one that nobody laid a file out for, or that has its record already."""
        known = self._samples.get(rid)
        if known is not None:
            return known
        path = self._spool / f"{rid}.json"
        if "/" in rid or not path.exists() or (self._spool / f"{rid}.done.json").exists():
            return None
        try:
            request = spec.read(spec.CaptureRequest, path)
            layout.check(request, rid, self._spec, self._ring.row_bytes)
            sample = Sample(rid, request, self._ring.row_bytes)
        except (spec.SpecError, OSError) as e:
            sample = Sample(rid, None, self._ring.row_bytes)
            self._remember(sample)
            self._fail(rid, str(e))
            return None
        self._remember(sample)
        return sample

    def _remember(self, sample: Sample) -> None:
        self._samples[sample.rid] = sample
        if len(self._samples) > _REMEMBERED:
            self._samples.popitem(last=False)

    def _fail(self, rid: str, reason: str) -> None:
        sample = self._samples.get(rid)
        if sample is not None:
            sample.closed = True
            self._writers.put(Failure(sample, reason))

    def _sources(self, aux: Any, final: Any, input_ids: Any, batch: Any) -> list[torch.Tensor]:
        """One [T, H] tensor a plane, checked against what was asked for."""
        layers, hidden = self._spec.layers, self._ring.hidden
        now = self._target.layers_now()
        if now != layers:
            raise RuntimeError(f"layers_to_capture is {now}, expected {layers}: something changed it after the start")
        if aux is None or len(aux) == 0:
            raise RuntimeError("the model gave no auxiliary hidden states")
        if isinstance(aux, torch.Tensor):  # newer models pack the layers side by side: [T, L * H]
            if aux.shape[-1] != len(layers) * hidden:
                raise RuntimeError(
                    f"auxiliary hidden states are {aux.shape[-1]} wide, expected {len(layers)} * {hidden}"
                )
            aux = [aux[:, i * hidden : (i + 1) * hidden] for i in range(len(layers))]
        if len(aux) != len(layers):
            raise RuntimeError(f"{len(aux)} auxiliary hidden states came, expected {len(layers)}")
        if final is None:
            raise RuntimeError("the final norm was not called in this forward pass")
        rows = sum(_ints(batch.extend_seq_lens_cpu))
        sources = [*aux, final]
        for name, tensor in zip([*map(str, layers), "final"], sources, strict=True):
            # Padding after the last row is allowed; fewer rows mean that a rank holds only its part of them.
            if tensor.dim() != 2 or tensor.shape[0] < rows or tensor.shape[1] != hidden:
                raise RuntimeError(f"plane {name} is {list(tensor.shape)}, expected [{rows}, {hidden}]")
            if tensor.dtype != self._ring.dtype:
                raise RuntimeError(f"plane {name} is {tensor.dtype}, expected {self._ring.dtype}")
        if input_ids is None or input_ids.shape[0] < rows:
            raise RuntimeError("the forward pass has no token ids for its rows")
        return sources

    def _pass_on(self, parts: list[_Part], sources: list[torch.Tensor], input_ids: torch.Tensor) -> None:
        for n, run in enumerate(_runs(parts, self._ring.slot_rows)):
            first, shape = run[0].first, run[0].sample.shape
            rows = run[-1].first + run[-1].rows - first
            slot, copied = self._ring.fill(sources, input_ids, first, rows, shape, opens=n == 0)
            slot.hand_to(len(run), copied)
            for part in run:
                self._writers.put(Chunk(part.sample, slot, part.first - first, part.at, part.rows))


def _runs(parts: list[_Part], most: int) -> list[list[_Part]]:
    """Join neighbours of one layout into runs of at most ``most`` rows, cutting a part where it is longer."""
    runs: list[list[_Part]] = []
    room = 0
    for part in parts:
        done = 0
        while done < part.rows:
            last = runs[-1][-1] if runs else None
            joins = (
                last is not None
                and room > 0
                and last.first + last.rows == part.first + done
                and last.sample.shape == part.sample.shape
            )
            if not joins:
                runs.append([])
                room = most
            rows = min(room, part.rows - done)
            runs[-1].append(_Part(part.sample, part.first + done, rows, part.at + done))
            room -= rows
            done += rows
    return runs


def _ints(values: Any) -> list[int]:
    return [int(v) for v in (values.tolist() if isinstance(values, torch.Tensor) else values)]
