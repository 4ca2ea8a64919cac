"""The next-token proof: from the captured final hidden state alone, recompute the token that the server chose.

It fails where the final hidden state is of another layer, was normed once too often or not at all, belongs to
another request, or lost its last row: exactly the faults that no other check of a file can see.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hsx_host import formats
from hsx_host.fingerprint import DatasetSemantics
from hsx_host.head import Head, widen
from hsx_host.layouts import faults
from hsx_host.layouts.fields import ITEM_BYTES
from hsx_host.manifest import Published
from hsx_host.norm import NORM_FILE, FinalNorm

__all__ = ["NORM_FILE", "FinalNorm", "NextToken", "Verdict", "prove_published", "seeded"]

_BLOCK_BYTES = 16 << 20  # of the head as it is stored; its float32 copies are four times as much
_STORED = {"bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Verdict:
    """Of one sample. ``exact``: the same token; ``ok`` also for another within a bf16 tie. ``text`` has numbers."""

    ok: bool
    exact: bool
    text: str


class NextToken:
    """Proves samples of one data set, without torch. Holds the norm's weight; the head is read block by block."""

    def __init__(self, model_path: str, norm_file: Path, dtype: str = "bfloat16", final: str = "before_norm") -> None:
        self.norm = FinalNorm(norm_file, dtype)
        self._final = final
        self.head = Head(Path(model_path))

    def normed(self, final: Any) -> Any:
        """The data set's final hidden state, a torch tensor [..., H], as the head takes it."""
        return self.norm.apply(final) if self._final == "before_norm" else final

    def prove(self, last: Any, token: int) -> Verdict:
        """``prove_rows`` of one row: a torch tensor [H], the final hidden state of the last token."""
        return self.prove_rows(last.float().numpy()[None], [token])[0]

    def prove_rows(self, last: NDArray[np.float32], tokens: Sequence[int]) -> list[Verdict]:
        """Whether each token is the argmax of head times norm of its row, or tied with it in bf16.

        Two logits count as tied where they differ by at most

            2^-8 * max(|a|, |b|)  +  4 * 2^-9 * || (w_a - w_b) * h ||_2

        The first term: the server rounds each logit to bf16, by at most 2^-9 of it. The second: the captured row and
        the normed row were each rounded to bf16 (at most 2^-9 of an element, and the server's kernel may norm before it
        rounds); such errors are independent, so they add as a root of squares; 4 is about five standard deviations.

        :param last: float32 [k, H], the final hidden states of k samples' last tokens, as the data set holds them. The
            head is read once for all of them.
        """
        vocabulary = self.head.shape[0]
        sound = np.isfinite(last).all(-1) & last.any(-1)
        h = np.where(sound[:, None], last, np.float32(1))
        h = self.norm.rows(h) if self._final == "before_norm" else h
        best = np.full(len(last), -np.inf, np.float32)
        top = np.zeros(len(last), np.int64)
        step = max(1, _BLOCK_BYTES // self.head.row_bytes)
        for at in range(0, vocabulary, step) if sound.any() else ():
            logits = self.head.rows(at, min(at + step, vocabulary)) @ h.T
            i = logits.argmax(0)
            here = logits[i, np.arange(len(last))]
            top, best = np.where(here > best, at + i, top), np.maximum(here, best)
        verdicts = []
        for k, token in enumerate(tokens):
            if not sound[k]:
                verdicts.append(Verdict(False, False, "the final hidden state is not finite, or all zero"))
            elif not 0 <= token < vocabulary:
                text = f"the server gave token {token}, the head has {vocabulary} rows"
                verdicts.append(Verdict(False, False, text))
            elif int(top[k]) == token:
                verdicts.append(Verdict(True, True, f"next token {token}"))
            else:
                verdicts.append(self._tie(h[k], token, int(top[k]), float(best[k])))
        return verdicts

    def _tie(self, h: NDArray[np.float32], token: int, top: int, best: float) -> Verdict:
        row, row_top = self.head.rows(token, token + 1)[0], self.head.rows(top, top + 1)[0]
        logit = float(row @ h)
        tie = 2**-8 * max(abs(best), abs(logit)) + 4 * 2**-9 * float(np.linalg.norm((row_top - row) * h))
        numbers = f"{best:.4f} against {logit:.4f}, a tie reaches {tie:.4f}"
        if best - logit <= tie:
            return Verdict(True, False, f"next token {token} tied with {top} ({numbers})")
        return Verdict(False, False, f"head(norm(final)) gives token {top}, the server gave {token} ({numbers})")


def seeded(lines: Iterable[Published], count: int, seed: str) -> list[Published]:
    """A subset that only the data set and the rows decide: the same at every call."""
    rows = sorted(lines, key=lambda line: line.index)
    return sorted(random.Random(seed).sample(rows, min(count, len(rows))), key=lambda line: line.index)


def prove_published(
    model_path: str, dataset: Path, meaning: DatasetSemantics, lines: Sequence[Published]
) -> tuple[str, dict[int, str]]:
    """Next-token proof of published samples: a sentence with the counts, and why by row that failed."""
    if not lines:
        return "0 of 0 next tokens", {}
    form = formats.primary(meaning.formats)
    shape = meaning.shape
    prover = NextToken(model_path, dataset / NORM_FILE, meaning.dtype, meaning.final)
    problems: dict[int, str] = {}
    rows, whole = [], []
    for line in lines:
        try:
            rows.append(_last_row(dataset / line.file, line.tokens, form, shape))
            whole.append(line)
        except (OSError, ValueError) as e:
            problems[line.index] = f"{line.file} can't be loaded: {faults.reason(dataset / line.file, e)}"
    exact, tied = 0, 0
    verdicts = prover.prove_rows(np.stack(rows), [line.next_token for line in whole]) if rows else []
    for line, verdict in zip(whole, verdicts, strict=True):
        exact, tied = exact + verdict.exact, tied + (verdict.ok and not verdict.exact)
        if not verdict.ok:
            problems[line.index] = verdict.text
    ties = f", {tied} within bf16 ties" if tied else ""
    return f"{exact + tied} of {len(lines)} next tokens{ties}", problems


def _last_row(path: Path, tokens: int, form: formats.Format, shape: formats.Shape) -> NDArray[np.float32]:
    """The final plane's last row, float32 [H]."""
    final = form.planes(path, tokens, shape)[-1]
    with path.open("rb") as f:
        size = shape.hidden_size * ITEM_BYTES[shape.dtype]
        data = os.pread(f.fileno(), size, final.offset + (tokens - 1) * final.row_stride)
    return widen(data, _STORED[shape.dtype])
