"""What a run is told: the frozen plan and its parts."""

from __future__ import annotations

from dataclasses import dataclass, field


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
