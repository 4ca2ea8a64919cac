"""What a data set means, and the id that follows from it.

``dataset.json`` holds everything that a reader must know to use the files rightly: which layers, before
or after the norm, from which model, engine and launch settings. Whoever would put rows of another meaning beside them
is refused.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path

from hsx_host import formats, numerics, reuse, servers
from hsx_host.contract import RunSpec
from hsx_host.errors import BadInput, Refused, TryAgain
from hsx_host.formats import Shape
from hsx_host.model_facts import ModelFacts, read_model, weights_sha256
from hsx_host.state import read_document, write_document

DTYPES = {"bfloat16": 2, "float16": 2}  # name -> bytes an element
CONVENTION = "layer k is the residual stream that enters block k, counted from 0 (Hugging Face hidden_states[k])"

# What the rows themselves depend on. The paths of model and data may differ between hosts with equal rows, so they are
# recorded and compared, but are no part of the id.
_FINGERPRINTED = (
    "layers",
    "final",
    "norm_eps",
    "dtype",
    "formats",
    "engine",
    "engine_version",
    "model_revision",
    "model_config_sha256",
    "model_weights_sha256",
    "numerics",
)
_FIELDS = {  # where a person sets what differs
    "layers": "capture.layers",
    "dtype": "capture.dtype",
    "formats": "capture.formats",
    "data_path": "data.path",
    "shard_size": "data.shard_size",
    "model_path": "model.path",
    "model_revision": "model.revision",
}


@dataclass(frozen=True)
class DatasetSemantics:
    """``dataset.json``. Layer ids are physical: ``layers`` are hsx's own (see ``convention``), the final apart.

    ``numerics``: flags and variables of the extraction server that can change rows (``hsx_host.numerics``).
    """

    dataset_id: str
    data_name: str
    data_path: str
    shard_size: int
    layers: list[int]
    convention: str
    final: str
    norm_eps: float
    dtype: str
    formats: list[str]
    engine: str
    engine_version: str
    model_path: str
    model_revision: str
    model_config_sha256: str
    model_weights_sha256: str
    architecture: str
    num_blocks: int
    hidden_size: int
    vocab_size: int
    numerics: dict[str, str] = field(default_factory=dict)

    @property
    def planes(self) -> list[str]:
        """Names of the captured planes, in the order of the files: the layers ascending, then the final."""
        return [*(f"layer_{k}" for k in self.layers), "final"]

    @property
    def shape(self) -> Shape:
        """What every sample of the data set has in common."""
        return Shape(self.planes, self.hidden_size, self.dtype)

    @property
    def bytes_per_token(self) -> int:
        """Bytes that one token's hidden states take."""
        return len(self.planes) * self.hidden_size * DTYPES[self.dtype]


def semantics(spec: RunSpec, facts: ModelFacts | None = None) -> DatasetSemantics:
    """The meaning of the data set that this spec makes. Reads config.json and samples the weights (under a second).

    :raises BadInput: where the capture settings don't fit the model, or a name can't be part of an id.
    """
    facts = facts or read_model(spec.model.path)
    _check(spec, facts)
    known = {
        "layers": list(spec.capture.layers),
        "final": f"{formats.primary(spec.capture.formats).NORM}_norm",
        "norm_eps": facts.norm_eps,
        "dtype": spec.capture.dtype,
        # Only the one that the capture writes: derived ones add folders, and change no row of what is there.
        "formats": list(spec.capture.formats[:1]),
        "engine": "sglang",
        "engine_version": engine_version(),
        "model_revision": spec.model.revision,
        "model_config_sha256": facts.config_sha256,
        "model_weights_sha256": weights_sha256(spec.model.path),
        "numerics": numerics.of(spec.extraction),
    }
    text = json.dumps({k: known[k] for k in _FINGERPRINTED}, sort_keys=True)
    fingerprint = hashlib.sha256(text.encode()).hexdigest()[:12]
    return DatasetSemantics(
        dataset_id=f"{spec.profile}-{spec.data.name}-{fingerprint}",
        data_name=spec.data.name,
        data_path=spec.data.path,
        shard_size=spec.data.shard_size,
        convention=CONVENTION,
        model_path=spec.model.path,
        architecture=facts.architecture,
        num_blocks=facts.num_blocks,
        hidden_size=facts.hidden_size,
        vocab_size=facts.vocab_size,
        **known,  # type: ignore[arg-type]
    )


def dataset_dir(spec: RunSpec, meaning: DatasetSemantics) -> Path:
    """``<output>/<dataset_id>``."""
    return Path(spec.host.output_root) / meaning.dataset_id


def settle(folder: Path, meaning: DatasetSemantics, *, write: bool) -> None:
    """Write ``dataset.json`` where there is none; Refused, naming the field, where another meaning stands there."""
    found = read_document(DatasetSemantics, folder / "dataset.json")
    if found is None:
        if write:
            folder.mkdir(parents=True, exist_ok=True)
            write_document(folder / "dataset.json", meaning)
        return
    if other := numerics.difference(found.numerics, meaning.numerics):
        name, was, now = other
        raise Refused(
            f"the data set in {folder} was made with {name} {was}",
            field=f"extraction.{'flags' if name.startswith('--') else 'env'} {name}",
            value=now,
            fix="set it back, or give the data set another data.name",
        )
    there, here = asdict(found), asdict(meaning)
    for name in sorted(there, key="dataset_id".__eq__):  # the id last: it follows from the others
        if there[name] != here[name]:
            raise Refused(
                f"the data set in {folder} was made with {name} = {there[name]!r}",
                field=_FIELDS.get(name, name),
                value=here[name],
                fix="set it back, or give the data set another data.name",
            )


def opened(spec: RunSpec) -> tuple[Path, DatasetSemantics]:
    """Folder and meaning of a data set that ``plan`` has already made; TryAgain where it has not."""
    meaning = semantics(spec)
    folder = dataset_dir(spec, meaning)
    if not (folder / "dataset.json").exists():
        raise TryAgain(
            "the data set has not been planned on this host",
            field="data.name",
            value=folder,
            fix="run plan (without --dry-run) first",
        )
    settle(folder, meaning, write=False)
    reuse.finish(folder, meaning.shard_size)
    return folder, meaning


def engine_version() -> str:
    """The version of SGLang under this Python."""
    try:
        return importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise BadInput(
            "SGLang is not installed under this Python", field="host.python", fix="give the Python that runs the server"
        ) from None


def _check(spec: RunSpec, facts: ModelFacts) -> None:
    servers.check_model(spec.extraction, spec.model.path)
    layers = spec.capture.layers
    if not layers or sorted(set(layers)) != list(layers):
        raise BadInput("must ascend, each layer once", field="capture.layers", value=layers, fix="e.g. [3, 31, 59]")
    if layers[0] < 1 or layers[-1] >= facts.num_blocks:
        raise BadInput(
            f"the model has {facts.num_blocks} blocks: layers are 1 to {facts.num_blocks - 1}",
            field="capture.layers",
            value=layers,
            fix="layer k enters block k; the final hidden state is captured anyway",
        )
    if spec.capture.dtype not in DTYPES:
        raise BadInput(
            "no dtype that hsx writes",
            field="capture.dtype",
            value=spec.capture.dtype,
            fix="one of " + ", ".join(DTYPES),
        )
    formats.of_run(spec.capture.formats)
    for where, name in (("profile", spec.profile), ("data.name", spec.data.name)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise BadInput(
                "can't be part of a folder's name", field=where, value=name, fix="use letters, digits, . _ -"
            )
    if spec.data.shard_size < 1:
        raise BadInput("must be 1 or more", field="data.shard_size", value=spec.data.shard_size, fix="e.g. 500")
