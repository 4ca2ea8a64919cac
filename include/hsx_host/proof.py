"""The next-token proof: from the captured final hidden state alone, recompute the token that the server chose.

It fails where the final hidden state is of another layer, was normed once too often or not at all, belongs to
another request, or lost its last row: exactly the faults that no other check of a file can see.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsx_host import formats
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.fingerprint import DatasetSemantics
from hsx_host.manifest import Published
from hsx_host.model_facts import read_model
from hsx_host.shards import write_whole

NORM_FILE = "final_norm.safetensors"
_HEADS = ("lm_head.weight",)
_EMBEDDINGS = ("embed_tokens.weight",)
_VOCABULARY_STEP = 8192  # rows of lm_head that are widened to float32 at once: 235 MB at 7168
_PLAIN_NORMS = ("RMSNorm", "LlamaRMSNorm", "Qwen3RMSNorm")


@dataclass(frozen=True)
class Verdict:
    """Of one sample. ``exact``: the same token; ``ok`` also for another within a bf16 tie. ``text`` has numbers."""

    ok: bool
    exact: bool
    text: str


class NextToken:
    """Proves samples of one data set. Holds the norm's weight and a memory map of the head, nothing else."""

    def __init__(self, model_path: str, norm_file: Path, dtype: str = "bfloat16") -> None:
        import torch
        from safetensors import safe_open

        try:
            with safe_open(str(norm_file), framework="pt") as f:
                self._weight = f.get_tensor("weight").float()
                self._eps = float(f.get_tensor("eps")[0])
        except Exception as e:
            raise TryAgain(f"the final norm can't be read: {e}", field=NORM_FILE, value=norm_file) from None
        self._dtype = getattr(torch, dtype)
        file, self._name = find_head(Path(model_path))
        self._file = safe_open(str(file), framework="pt")
        self._head = self._file.get_slice(self._name)
        kind = self._head.get_dtype()
        if kind not in ("BF16", "F16", "F32"):
            raise Refused(
                f"the head is stored as {kind}: the next token can't be recomputed", field="model.path", value=file
            )

    def normed(self, final: Any) -> Any:
        """RMSNorm in float32, rounded to the model's dtype: x / sqrt(mean(x^2) + eps) * weight.

        Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), formula 4 with eps under the root, as
        Llama's models and SGLang's ``RMSNorm.forward_native`` have it.

        :param final: [..., H], before the norm.
        """
        x = final.float()
        scale = (x.pow(2).mean(-1, keepdim=True) + self._eps).rsqrt()
        return (x * scale * self._weight).to(self._dtype)

    def prove(self, last: Any, token: int) -> Verdict:
        """Whether ``token`` is the argmax of head times norm of the last row, or tied with it in bf16.

        Two logits count as tied where they differ by at most

            2^-8 * max(|a|, |b|)  +  4 * 2^-9 * || (w_a - w_b) * h ||_2

        The first term: the server rounds each logit to bf16, by at most 2^-9 of it. The second: the captured row and
        the normed row were each rounded to bf16 (at most 2^-9 of an element, and the server's kernel may norm before it
        rounds); such errors are independent, so they add as a root of squares; 4 is about five standard deviations.

        :param last: [H], the final hidden state of the last token, before the norm.
        """
        import torch

        if not bool(last.isfinite().all()) or not bool(last.any()):
            return Verdict(False, False, "the final hidden state is not finite, or all zero")
        h = self.normed(last).float()
        vocabulary = self._head.get_shape()[0]
        if not 0 <= token < vocabulary:
            return Verdict(False, False, f"the server gave token {token}, the head has {vocabulary} rows")
        best, top, row_top = float("-inf"), -1, None
        for at in range(0, vocabulary, _VOCABULARY_STEP):
            rows = self._head[at : at + _VOCABULARY_STEP].float()
            logits = rows @ h
            i = int(logits.argmax())
            if float(logits[i]) > best:
                best, top, row_top = float(logits[i]), at + i, rows[i].clone()
        if top == token:
            return Verdict(True, True, f"next token {token}")
        row = self._head[token : token + 1][0].float()
        logit = float(row @ h)
        spread = float(torch.linalg.vector_norm((row_top - row) * h))
        tie = 2**-8 * max(abs(best), abs(logit)) + 4 * 2**-9 * spread
        numbers = f"{best:.4f} against {logit:.4f}, a tie reaches {tie:.4f}"
        if best - logit <= tie:
            return Verdict(True, False, f"next token {token} tied with {top} ({numbers})")
        return Verdict(False, False, f"head(norm(final)) gives token {top}, the server gave {token} ({numbers})")


def find_head(model: Path) -> tuple[Path, str]:
    """File and tensor name of lm_head, or of the embedding that it is tied to. Reads headers and the index only."""
    from safetensors import safe_open

    index = model / "model.safetensors.index.json"
    names: dict[str, Path] = {}
    if index.exists():
        names = {name: model / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    else:
        for file in sorted(model.glob("*.safetensors")):
            with safe_open(str(file), framework="pt") as f:
                names |= dict.fromkeys(f.keys(), file)
    wanted = _EMBEDDINGS if read_model(model).tie_word_embeddings else _HEADS
    # a draft or vision part may have a head of its own: the shortest path belongs to the language model
    found = sorted((n for n in names if n.endswith(wanted)), key=lambda n: (n.count("."), n))
    if not found:
        raise BadInput(f"the weights hold no {wanted[0]}", field="model.path", value=model, fix="give the whole model")
    return names[found[0]], found[0]


def keep_norm(spool: Path, norm_class: str, dataset: Path) -> Path:
    """Copy the norm that the plugin saw beside the data set; Refused where another one stands there already."""
    if norm_class not in _PLAIN_NORMS:
        raise Refused(
            "the model's final norm is no plain RMSNorm, so its formula is not known here",
            field="model.path",
            value=norm_class,
            fix="use a model with RMSNorm",
        )
    data, kept = (spool / NORM_FILE).read_bytes(), dataset / NORM_FILE
    if not kept.exists():
        write_whole(kept, data)
    elif kept.read_bytes() != data:
        raise Refused(
            "the server's final norm differs from the one that the data set was made with",
            field=NORM_FILE,
            value=kept,
            fix="the weights have changed: give the data set another data.name",
        )
    return kept


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
    form = formats.direct(meaning.formats)
    shape = formats.Shape(meaning.planes, meaning.hidden_size, meaning.dtype)
    prover = NextToken(model_path, dataset / NORM_FILE, meaning.dtype)
    exact, tied = 0, 0
    problems: dict[int, str] = {}
    for line in lines:
        try:
            verdict = prover.prove(form.load(dataset / line.file, shape)["planes"][-1][-1], line.next_token)
        except (OSError, ValueError, RuntimeError) as e:
            problems[line.index] = f"{line.file} can't be loaded: {e}"
            continue
        exact, tied = exact + verdict.exact, tied + (verdict.ok and not verdict.exact)
        if not verdict.ok:
            problems[line.index] = verdict.text
    ties = f", {tied} within bf16 ties" if tied else ""
    return f"{exact + tied} of {len(lines)} next tokens{ties}", problems
