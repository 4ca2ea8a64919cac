"""What verbs answer about the borrowed host: disk, servers, lease, benchmarks, jobs."""

from __future__ import annotations

from dataclasses import dataclass, field


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


JOB_DEADLINE = 124  # a job's ``rc`` where its deadline ended it


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
