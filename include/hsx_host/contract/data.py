"""What verbs answer about the samples: plan, proof, shards, formats, hand-off, training, acceptance."""

from __future__ import annotations

from dataclasses import dataclass, field

from hsx_host.contract.borrowing import ServerFacts


@dataclass(frozen=True)
class ShardPlan:
    """One shard with something to do. Rows are line numbers of the data file, counted from 0.

    ``failed``: how many of ``todo`` were tried before and failed; ``reasons`` names some, with their tries.
    """

    id: int
    name: str
    first_row: int
    rows: int
    todo: int
    tokens: int
    bytes: int
    failed: int = 0
    reasons: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Pace:
    """What the last shards of this profile took on this host. ``overhead_s``: how much longer production was down than
    extraction took, the last time; 0 where it has not come back yet. ``at``: when the last shard ended."""

    tok_s: float
    tokens: int
    shards: int
    overhead_s: float
    at: float


@dataclass(frozen=True)
class PlanResult:
    """What would be extracted. ``todo_*`` leave out what is already published; ``rejects`` names at most 20 rows.

    ``pace``: what was measured here before, None before the first shard.
    ``rows`` are the data file's; ``valid`` counts the ``top_ups`` too, which lie in shards of their own.
    ``handed_off``: the hand-off that is there is of what is published now.
    ``changed`` of ``todo`` are rows whose published sample is gone from the data file; ``moved`` of ``done`` are
    published samples that stand in another row of it now; ``derive`` are samples that a derived format lacks.
    """

    dataset_id: str
    dataset_dir: str
    rows: int
    valid: int
    rejected: int
    duplicates: int
    done: int
    todo: int
    todo_tokens: int
    todo_bytes: int
    bytes_per_token: int
    longest: int
    shards: list[ShardPlan]
    rejects: list[str]
    pace: Pace | None = None
    top_ups: int = 0
    handed_off: bool = False
    changed: int = 0
    moved: int = 0
    derive: int = 0
    derive_bytes: int = 0


@dataclass(frozen=True)
class ProbeCase:
    """One case of the probe matrix."""

    name: str
    tokens: int
    ok: bool
    text: str


@dataclass(frozen=True)
class ProbeReport:
    """The whole matrix; ``ok`` only where every case is."""

    ok: bool
    cases: list[ProbeCase]
    seconds: float


@dataclass(frozen=True)
class ShardSummary:
    """One shard after ``extract``. ``published`` counts samples in the manifest, ``extracted`` those of this call,
    ``left`` those that the end of the window left for the next run; ``new_*`` are of this call. ``server`` is the one
    that was left running: production, where this call borrowed the host itself and gave it back."""

    shard: int
    name: str
    samples: int
    published: int
    extracted: int
    failed: int
    tokens: int
    bytes: int
    seconds: float
    tok_s: float
    proof: str
    failures: list[str]
    left: int = 0
    new_tokens: int = 0
    new_bytes: int = 0
    server: ServerFacts | None = None


@dataclass(frozen=True)
class VerifyReport:
    """Published files against the manifest, and the next-token proof. Names at most 20 problems."""

    ok: bool
    samples: int
    tokens: int
    bytes: int
    missing: int
    failed: int
    proved: int
    problems: list[str]


@dataclass(frozen=True)
class ConvertedFormat:
    """A folder in one format. ``final``: before_norm or after_norm; ``written``: samples that this call made."""

    format: str
    path: str
    final: str
    approximate: bool
    samples: int
    written: int
    tokens: int
    bytes: int


@dataclass(frozen=True)
class ConvertResult:
    """One entry a format that was asked for."""

    formats: list[ConvertedFormat]


@dataclass(frozen=True)
class VocabResult:
    """A draft vocabulary. ``tokens`` trained on, ``different`` ones of them, ``covered``: their share in it (0 to 1).

    ``files``: token_freq, d2t and t2d (speculators), specforge, modelopt.
    """

    path: str
    draft_vocab_size: int
    target_vocab_size: int
    tokens: int
    different: int
    covered: float
    files: dict[str, str]


@dataclass(frozen=True)
class HandoffResult:
    """What training needs; ``handoff.json`` is the same. ``layer_ids`` are per engine, three ids, the final apart."""

    path: str
    profile: str
    dataset_id: str
    dataset_dir: str
    samples: int
    tokens: int
    bytes: int
    formats: dict[str, str]
    layers: list[int]
    final: str
    layer_ids: dict[str, list[int]]
    norm: dict[str, str]
    model: dict[str, str]
    engine: dict[str, str]
    manifest_sha256: str
    commands: dict[str, str]


@dataclass(frozen=True)
class TopUpResult:
    """After a top-up. ``had`` valid samples of the data file, ``wanted`` by the profile, ``made`` in all by top-ups."""

    path: str
    wanted: int
    had: int
    made: int
    now: int
    dropped: int
    tokens: int
    seconds: float
    text: str


@dataclass(frozen=True)
class HandoffCheck:
    """A hand-off as the training host finds it. ``data`` is the folder of the format that the trainer reads."""

    handoff: str
    dataset_id: str
    data: str
    samples: int
    tokens: int
    manifest_sha256: str
    work: str
    command: list[str]


@dataclass(frozen=True)
class TrainingResult:
    """After a training. ``drafter`` is the folder of its newest checkpoint."""

    name: str
    work: str
    drafter: str
    seconds: float
    resumed: bool


@dataclass(frozen=True)
class ServedFigures:
    """One server under the acceptance prompts. ``acceptance_length``: tokens a step of the target (1.0 alone)."""

    output_tok_s: float
    tokens: int
    seconds: float
    acceptance_length: float
    same_output: int


@dataclass(frozen=True)
class AcceptanceResult:
    """The target alone and with the drafter. ``speedup`` is the ratio of output tokens a second.

    ``same_output`` counts prompts whose greedy answer is the same with the drafter: rounding of the verified batch may
    change some.
    """

    drafter: str
    prompts: str
    held_out: bool
    samples: int
    steps: int
    alone: ServedFigures
    drafted: ServedFigures
    speedup: float
    ok: bool
    text: str
