"""Every JSON document that crosses SSH, as plain frozen dataclasses.

Both planes import this module and nothing else of each other's; ``wire`` says how a document is
written and what is refused. Units: bytes, seconds, tokens; times are unix seconds. Layer ids: k is
the residual stream that enters block k, counted from 0 (Hugging Face ``hidden_states[k]``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hsx_host.wire import ContractError, decode, encode, from_dict, to_dict

__all__ = ["ContractError", "decode", "encode", "from_dict", "to_dict"]

# ---------------------------------------------------------------- what a run is told (the spec)


@dataclass(frozen=True)
class HostSettings:
    """The borrowed host: where hsx keeps its state, and where data sets and old states live."""

    python: str
    home: str
    output_root: str
    old_state_roots: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ServerSettings:
    """One way to launch SGLang. ``args`` follow ``python -m sglang.launch_server``; host and port are in them too.

    ``env_file``: a file on the host (mode 0600) with more variables, such as tokens; its content stays there.
    """

    args: list[str]
    env: dict[str, str]
    host: str
    port: int
    start_timeout_s: float = 1800.0
    stop_grace_s: float = 60.0
    soak_requests: int = 128
    env_file: str = ""


@dataclass(frozen=True)
class ServiceSettings:
    """How production is started and stopped where that isn't hsx itself (``manager`` systemd or command).

    ``systemctl`` is the command before the verb (``["sudo", "-n", "systemctl"]``, ``["systemctl", "--user"]``);
    ``pid_command`` prints the main process's pid, where the listener on the port can't be seen by this login.
    """

    unit: str = ""
    systemctl: list[str] = field(default_factory=lambda: ["systemctl"])
    start_command: list[str] = field(default_factory=list)
    stop_command: list[str] = field(default_factory=list)
    pid_command: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class ModelSettings:
    """The target model. ``path`` is a folder on the host; ``revision`` is kept in the fingerprint."""

    path: str
    revision: str = ""


@dataclass(frozen=True)
class CaptureSettings:
    """What is captured. The final hidden state is always captured before the final norm, apart from ``layers``."""

    layers: list[int]
    formats: list[str]
    dtype: str = "bfloat16"
    writers: int = 4
    ring_bytes: int = 4 << 30


@dataclass(frozen=True)
class DataSettings:
    """The pre-tokenised data set and how it is cut. ``shards`` empty means all; ``max_rejects`` is a number of rows."""

    path: str
    name: str
    shard_size: int
    shards: list[int] = field(default_factory=list)
    max_rejects: int = 0
    concurrency: int = 64
    tries: int = 3
    request_timeout_s: float = 600.0
    proof_samples: int = 8


@dataclass(frozen=True)
class BenchmarkLoad:
    """One load of ``sglang.bench_serving``: random ids of fixed lengths."""

    prompts: int
    input_tokens: int
    output_tokens: int
    concurrency: int


@dataclass(frozen=True)
class BenchmarkSettings:
    """Loads by name (``single``, ``high``), and how far restored production may lie below the baseline (0.05 = 5 %)."""

    enabled: bool
    loads: dict[str, BenchmarkLoad]
    tolerance: float = 0.05


@dataclass(frozen=True)
class CleanupSettings:
    """``never`` refuses to delete, ``ask`` waits for a person's approval, ``auto`` deletes what the list names."""

    policy: str = "never"
    reserve_bytes: int = 10 * (1 << 30)


@dataclass(frozen=True)
class TopUpSettings:
    """More samples by the model itself: answers of production to given prompts, until the data set has ``samples``.

    ``prompts`` is a ``.jsonl`` file on the host: ``{"prompt": text}``, ``{"messages": [...]}`` or ``{"input_ids":
    [...]}`` a line. The seed orders the prompts and is handed on with each request.
    """

    samples: int
    prompts: str
    concurrency: int = 8
    temperature: float = 0.7
    top_p: float = 1.0
    seed: int = 0
    max_new_tokens: int = 512
    tries: int = 3
    request_timeout_s: float = 600.0


@dataclass(frozen=True)
class AcceptanceSettings:
    """A target served alone and with a drafter, under the same prompts. ``server`` is the target alone.

    ``prompts`` as for a top-up; empty takes prompts of the data set itself, which the drafter has seen. ``steps`` draft
    tokens in a chain; ``draft_flags`` are added to the server with the drafter. ``minimum``: the acceptance length
    (tokens a step of the target, 1.0 without any draft) below which the verb refuses; 0 only tells.
    """

    server: ServerSettings
    prompts: str = ""
    samples: int = 32
    output_tokens: int = 128
    concurrency: int = 1
    steps: int = 3
    minimum: float = 0.0
    draft_flags: list[str] = field(default_factory=list)
    draft_env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainingSettings:
    """One training. ``command`` may hold the places of ``hsx_host.trainers``; ``format`` is what it reads.

    ``root``: below it, each data set's drafter has a folder of its own, named by ``name`` and the data's hash.
    """

    name: str
    command: list[str]
    format: str
    root: str
    python: str
    env: dict[str, str] = field(default_factory=dict)
    acceptance: AcceptanceSettings | None = None


@dataclass(frozen=True)
class RunSpec:
    """The frozen plan of one run: every verb takes it, nothing else decides what a verb does.

    ``page_command``: the owner's program that wakes somebody; the guards call it with one text more (see ``page``).
    """

    run_id: str
    profile: str
    manager: str
    host: HostSettings
    production: ServerSettings
    extraction: ServerSettings
    model: ModelSettings
    capture: CaptureSettings
    data: DataSettings
    benchmark: BenchmarkSettings
    cleanup: CleanupSettings
    lease_ttl_s: float = 900.0
    service: ServiceSettings = field(default_factory=ServiceSettings)
    top_up: TopUpSettings | None = None
    training: TrainingSettings | None = None
    page_command: list[str] = field(default_factory=list)


# ---------------------------------------------------------------- what verbs answer


@dataclass(frozen=True)
class ErrorDoc:
    """Why a verb ended with another code than 0. ``kind``: bad_input, refused, again, bug. ``count``: of the samples
    that failed, where they are the reason."""

    kind: str
    message: str
    field: str = ""
    value: str = ""
    fix: str = ""
    count: int = 0


@dataclass(frozen=True)
class PreflightResult:
    """Facts about the host. ``problems`` is empty, or the verb ended with 2 or 3 and an ErrorDoc that lists them."""

    python: str
    sglang: str
    torch: str
    gpus: list[str]
    home: str
    output_free_bytes: int
    production_healthy: bool
    warnings: list[str]


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
class OldState:
    """One folder of old hidden states: what stands to be deleted, and what must still hold when it is.

    ``newest``: the last change in it; ``accessed``: when a file of it was read last, as far as the file system notes
    that (unix seconds). Reading changes nothing of what is approved.
    """

    path: str
    bytes: int
    files: int
    device: int
    inode: int
    newest: float
    accessed: float = 0.0


@dataclass(frozen=True)
class DiskVerdict:
    """Needed against free against reclaimable on the output's file system. ``verdict``: fits, cleanup, short."""

    verdict: str
    needed_bytes: int
    free_bytes: int
    reserve_bytes: int
    reclaimable_bytes: int
    old_states: list[OldState]
    text: str


@dataclass(frozen=True)
class CleanupResult:
    """What was deleted, and the bytes that the file system counts as freed."""

    deleted: list[str]
    refused: dict[str, str]
    freed_bytes: int


@dataclass(frozen=True)
class LoadFigures:
    """What ``sglang.bench_serving`` measured under one load."""

    output_tok_s: float
    total_tok_s: float
    ttft_ms: float
    tpot_ms: float
    completed: int
    seconds: float


@dataclass(frozen=True)
class BenchmarkResult:
    """One benchmark of production. ``ratios`` compare with the baseline by load (1.0 = as before), if one is kept."""

    when: str
    loads: dict[str, LoadFigures]
    ratios: dict[str, float]
    within_tolerance: bool
    text: str


@dataclass(frozen=True)
class Lease:
    """Who holds the host. ``since`` and ``expires`` are unix seconds, for people.

    What decides is ``until``, on the monotonic clock of the boot ``boot_id``: no clock change moves it, and a lease of
    an earlier boot has lapsed.
    """

    run_id: str
    since: float
    expires: float
    boot_id: str = ""
    until: float = 0.0


@dataclass(frozen=True)
class ServerFacts:
    """A running (or stopped) server as hsx left it. ``pid`` 0 means none."""

    mode: str
    changed: bool
    pid: int
    port: int
    launch_hash: str
    ready_s: float
    plugin_id: str
    log: str


@dataclass(frozen=True)
class RestoreReport:
    """How the host was given back. ``action``: restored, guarded (a run still holds it; its guards live), nothing.

    ``changed``: production was down and was started. ``problems``: in what production is not as it was, or what could
    not be proved; empty where all is well. ``files_checked`` counts files of the installed SGLang, 0 where not asked.
    """

    action: str
    text: str
    mode: str
    changed: bool
    pid: int
    port: int
    ready_s: float
    log: str
    sglang: str
    files_checked: int
    pristine: bool
    problems: list[str]


@dataclass(frozen=True)
class PatchReport:
    """The capture plugin's folder and the installed SGLang against its RECORD. ``seams`` of a live server."""

    plugin_id: str
    plugin_dir: str
    sglang: str
    files_checked: int
    pristine: bool
    seams: dict[str, str]


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


JOB_DEADLINE = 124  # a job's ``rc`` where its deadline ended it


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


@dataclass(frozen=True)
class JobStatus:
    """A detached verb. ``state``: running, done (``rc`` is set), dead (gone without an exit code), absent.

    ``log`` is what the job wrote to stderr since the asked offset; ``offset`` is where to go on.
    ``document`` is the one JSON document of its stdout, as text, once it is done.
    """

    id: str
    state: str
    rc: int | None
    pid: int
    log: str
    offset: int
    document: str


@dataclass(frozen=True)
class StatusResult:
    """How the host stands. ``mode``: production, extraction, stopped, or unknown where hsx has touched nothing yet.

    ``phase``: starting or running, empty without a server. ``healthy`` is asked for (``--health``): a real token came;
    ``problem`` says why not. ``lease``: who holds the host; ``lapses_in_s`` counts by the host's monotonic clock, 0
    where it has lapsed. ``guards``: the pids of those that live. ``in_the_way``: what keeps production, or the next
    run, from the host. ``journal``: the last transitions, JSON lines.
    """

    mode: str
    phase: str
    pid: int
    healthy: bool
    problem: str
    lease: Lease | None
    journal: list[str]
    lapses_in_s: float = 0.0
    guards: list[int] = field(default_factory=list)
    in_the_way: list[str] = field(default_factory=list)
