"""What hsx needs to know of the target model, read from its ``config.json`` alone (no torch, milliseconds)."""

from __future__ import annotations

import hashlib
import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from hsx_host import servers
from hsx_host.contract import ServerSettings
from hsx_host.errors import BadInput

# SGLang refuses a prompt of `length >= min(context, KV pool) - 6`: one token to generate and five of its own
# (0.5.23, managers/tp_worker.py: max_req_len = min(context_len, capacity) - 1; max_req_input_len = max_req_len - 5).
RESERVED_TOKENS = 7
_HEADER_BYTES = 100 << 20  # safetensors' own limit
_SAMPLE, _READERS = 4 << 10, 16


@dataclass(frozen=True)
class ModelFacts:
    """Facts of one model folder. Sizes in tokens and elements; ``config_sha256`` is of config.json's bytes."""

    num_blocks: int
    hidden_size: int
    vocab_size: int
    context_length: int
    architecture: str
    tie_word_embeddings: bool
    norm_eps: float
    config_sha256: str


def read_model(path: str | Path) -> ModelFacts:
    """Facts of the model in folder ``path``. A multimodal model's text part counts (``text_config``, e.g. Kimi-K2.5).

    :raises BadInput: with field ``model.path``, where config.json is missing, broken or lacks what is needed.
    """
    file = Path(path) / "config.json"
    try:
        raw = file.read_bytes()
    except OSError as e:
        _bad(path, f"config.json can't be read: {e.strerror}")
    try:
        whole = json.loads(raw)
    except ValueError as e:
        _bad(path, f"config.json is not JSON: {e}")
    if not isinstance(whole, dict):
        _bad(path, "config.json does not hold an object")
    text = whole.get("text_config")
    config: dict[str, Any] = text if isinstance(text, dict) else whole
    architectures = whole.get("architectures") or config.get("architectures") or [""]
    eps = next((config[k] for k in ("rms_norm_eps", "norm_epsilon", "layer_norm_eps") if k in config), None)
    if not isinstance(eps, (int, float)) or isinstance(eps, bool):
        _bad(path, "config.json has no rms_norm_eps")
    tie = config.get("tie_word_embeddings", whole.get("tie_word_embeddings", False))
    return ModelFacts(
        num_blocks=_count(config, "num_hidden_layers", path),
        hidden_size=_count(config, "hidden_size", path),
        vocab_size=_count(config, "vocab_size", path),
        context_length=_count(config, "max_position_embeddings", path),
        architecture=str(architectures[0]),
        tie_word_embeddings=bool(tie),
        norm_eps=float(eps),
        config_sha256=hashlib.sha256(raw).hexdigest(),
    )


def weights_sha256(path: str | Path) -> str:
    """A hash that changes when the weights do: of every safetensors file its name, size, header and 3 MiB (start,
    middle, end), and 4 KiB from the middle of every tensor.

    Two fine-tunes share one config.json, and may differ in a few tensors; reading all of a terabyte to tell them apart
    would take minutes.
    """
    files = sorted(Path(path).glob("*.safetensors"))
    if not files:
        _bad(path, "no *.safetensors file: the weights can't be told apart, nor the next token proved")
    with ThreadPoolExecutor(_READERS) as pool:  # many small reads of a cold disk: they wait side by side
        parts = list(pool.map(_sampled, files))
    return hashlib.sha256(b"".join(parts)).hexdigest()


def _sampled(file: Path) -> bytes:
    start, tensors = header(file)
    try:
        places = sorted((int(one["data_offsets"][0]), int(one["data_offsets"][1])) for one in tensors.values())
    except (KeyError, TypeError, IndexError, ValueError):
        _bad(file, "its header has no data_offsets")
    size, part = file.stat().st_size, 1 << 20
    digest = hashlib.sha256(f"{file.name} {size}\n".encode())
    with file.open("rb") as f:
        digest.update(os.pread(f.fileno(), max(part, start), 0))
        for at in (max(0, size // 2 - part // 2), max(0, size - part)):
            digest.update(os.pread(f.fileno(), part, at))
        for first, end in places:
            at = max(first, (first + end - _SAMPLE) // 2)
            digest.update(os.pread(f.fileno(), min(_SAMPLE, end - first), start + at))
    return digest.digest()


def header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begins, and its tensors by name; BadInput where it is none."""
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if not 0 < length <= _HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            tensors = dict(json.loads(f.read(length)))
    except (OSError, ValueError, TypeError) as e:
        raise BadInput(
            f"the weights can't be read: {e}", field="model.path", value=file, fix="give the whole model"
        ) from None
    tensors.pop("__metadata__", None)
    return 8 + length, tensors


def longest_prompt(facts: ModelFacts, server: ServerSettings) -> int:
    """The longest prompt, in tokens, that the server takes: its context or KV pool, less what SGLang keeps back."""
    limits = [server_flag(server, "--context-length") or facts.context_length]
    pool = server_flag(server, "--max-total-tokens")
    if pool is not None:
        limits.append(pool)
    return min(limits) - RESERVED_TOKENS


def server_flag(server: ServerSettings, flag: str) -> int | None:
    """A whole-number flag of the launch arguments; None where it is not given."""
    given = servers.flags(server.args).get(flag)
    if given is None:
        return None
    try:
        return int(given[0])
    except (ValueError, IndexError):
        raise BadInput("not a whole number", field=f"extraction {flag}", value=given, fix="give a number") from None


def _count(config: dict[str, Any], key: str, path: str | Path) -> int:
    value = config.get(key)
    if type(value) is not int or value < 1:
        _bad(path, f"config.json: {key} = {value!r} is not a positive whole number")
    return value


def _bad(path: str | Path, what: str) -> NoReturn:
    raise BadInput(what, field="model.path", value=path, fix="give the folder of a Hugging Face model on the host")
