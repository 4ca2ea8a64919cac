"""Profiles: what a host and model's YAML file says, read strictly.

Every problem of a file is reported at once, each with the field, the value and the fix.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from hsx_operators import INCLUDE
from hsx_operators.errors import ProfileError
from hsx_operators.hosts import HOST_NAME, POOL, host_bodies, moved
from hsx_operators.problems import path_of, problem
from hsx_operators.profile_files import expanded, profile_file, read_body
from hsx_operators.trainers import Training
from hsx_operators.unattended import Alerts, Nightly

#: Formats of a data set: the modules of hsx_host.formats, which is not imported here (it belongs to the host).
FORMATS = tuple(sorted(p.stem for p in (INCLUDE / "hsx_host" / "formats").glob("[a-z]*.py")))

Port = Annotated[int, Field(ge=1, le=65535)]
Positive = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Absolute = Annotated[str, Field(pattern=r"^/[^\x00\n]*$")]
FlagValue = bool | int | float | str | list[str] | None


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Host(_Model):
    """Where the host is, and where hsx lives on it. ``name`` and ``pool`` tell the hosts of one profile apart."""

    name: str = Field("", pattern=HOST_NAME)
    pool: str = Field(POOL, min_length=1)
    ssh_conn_id: str = Field(min_length=1)
    python: Absolute
    home: Absolute
    output_root: Absolute
    old_state_roots: list[Absolute] = []


class Model(_Model):
    """The target model: a folder on the host."""

    path: Absolute
    revision: str = ""


class Production(_Model):
    """How production is launched; it is given back exactly so.

    ``manager``: who starts and stops it. ``process``: hsx, as a process of its own. ``systemd``: ``unit``, by the
    command ``systemctl``. ``command``: ``start_command`` and ``stop_command``, with ``pid_command`` where this login
    can't see who listens on the port. ``env_file``: a file on the host, mode 0600, with variables that must stay there.
    """

    manager: Literal["process", "systemd", "command"] = "process"
    unit: str = Field("", pattern=r"^([A-Za-z0-9:_.\\@-]+\.service)?$")
    systemctl: list[str] = Field(["systemctl"], min_length=1)
    start_command: list[str] = []
    stop_command: list[str] = []
    pid_command: list[str] = []
    env_file: Absolute | Literal[""] = ""
    host: str = "127.0.0.1"
    port: Port
    args: list[str] = []
    env: dict[str, str] = {}
    start_timeout_s: Seconds = 1800
    stop_grace_s: Seconds = 60
    soak_requests: Natural = 128

    @model_validator(mode="after")
    def _manager_is_whole(self) -> Self:
        needed = {"systemd": ("unit",), "command": ("start_command", "stop_command")}.get(self.manager, ())
        if missing := [name for name in needed if not getattr(self, name)]:
            raise ValueError(f"manager {self.manager} needs {' and '.join(missing)}")
        return self


class Extraction(_Model):
    """What differs from production: ``flags`` (true adds, a value replaces, null removes), ``env`` (null removes)."""

    flags: dict[str, FlagValue] = {}
    env: dict[str, str | None] = {}
    port: Port | None = None
    start_timeout_s: Seconds | None = None


class Capture(_Model):
    """Layers (k = what enters block k, from 0) and formats; the final hidden state is always captured.

    The capture writes the first format; the others are derived from it.
    """

    layers: list[Natural] = Field(min_length=1)
    formats: list[str] = Field(min_length=1)
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    writers: Positive = 4
    ring_bytes: Positive = 4 << 30

    @field_validator("layers")
    @classmethod
    def _ascending(cls, layers: list[int]) -> list[int]:
        if layers != sorted(set(layers)):
            raise ValueError("layers must ascend, each once")
        return layers

    @field_validator("formats")
    @classmethod
    def _known(cls, formats: list[str]) -> list[str]:
        if unknown := [name for name in formats if name not in FORMATS]:
            raise ValueError(f"there is no format {unknown[0]!r}; known: {', '.join(FORMATS)}")
        if len(set(formats)) != len(formats):
            raise ValueError("each format once")
        return formats


class TopUp(_Model):
    """Answers of production to ``prompts`` (a ``.jsonl`` on the host), until the data set has ``samples_wanted``."""

    prompts: Absolute
    concurrency: Positive = 8
    temperature: float = Field(0.7, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    seed: int = 0
    max_new_tokens: Positive = 512
    request_timeout_s: Seconds = 600


class Data(_Model):
    """The data set and how it is cut. ``samples_wanted`` more than it has: ``top_up`` makes the rest."""

    path: Absolute
    name: str = Field("", pattern=r"^[A-Za-z0-9._-]*$")
    shard_size: Positive
    max_rejects: Natural = 0
    concurrency: Positive = 64
    tries: Positive = 3
    request_timeout_s: Seconds = 600
    proof_samples: Natural = 8
    samples_wanted: Natural = 0
    top_up: TopUp | None = None

    @model_validator(mode="after")
    def _top_up_has_prompts(self) -> Data:
        if self.samples_wanted and self.top_up is None:
            raise ValueError("samples_wanted needs data.top_up, which names the prompts")
        return self


class Load(_Model):
    """One load of ``sglang.bench_serving``."""

    prompts: Positive
    input_tokens: Positive
    output_tokens: Positive
    concurrency: Positive


class Benchmark(_Model):
    """``tolerance``: how far restored production may lie below the baseline (0.05 = 5 %)."""

    enabled: bool = True
    tolerance: float = Field(0.05, ge=0, lt=1)
    loads: dict[str, Load] = {}


class Cleanup(_Model):
    """What may be deleted when the space is short."""

    policy: Literal["never", "ask", "auto"] = "never"
    reserve_bytes: Natural = 10 * (1 << 30)


class Tasks(_Model):
    """What Airflow does about failures and about a host that another run holds, and how long the host waits for a
    silent Airflow."""

    shard_retries: Annotated[int, Field(ge=0, le=5)] = 2
    when_held: Literal["wait", "fail"] = "wait"
    lease_ttl_s: Annotated[float, Field(ge=30)] = 900


class Profile(_Model):
    """One host, one model, one way to extract. A file may list several ``hosts``: see ``load_hosts``."""

    host: Host
    model: Model
    production: Production
    extraction: Extraction = Extraction()
    capture: Capture
    data: Data
    benchmark: Benchmark = Benchmark(enabled=False, tolerance=0.05)
    cleanup: Cleanup = Cleanup()
    tasks: Tasks = Tasks()
    nightly: Nightly = Nightly()
    alerts: Alerts = Alerts()
    training: Training | None = None


# ------------------------------------------------------------------------------ reading


def load_profile(name: str) -> Profile:
    """A profile's first (mostly only) host; ProfileError names everything that is wrong with the file."""
    return load_hosts(name)[0]


def load_hosts(name: str) -> list[Profile]:
    """Read, expand and validate a profile: one ``Profile`` a host that it lists, alike but for what a host has its own.

    ``host:`` is one host. ``hosts:`` are several: each entry has the fields of ``host``, a ``name``, and may change
    fields of ``production`` and ``extraction`` (a port, a tensor-parallel size).
    """
    return parse_hosts(read_body(name), f"profile {name} ({profile_file(name)})")


def parse_profile(body: Any, source: str) -> Profile:
    """Like ``load_profile``, from a parsed YAML document; ``source`` heads the error."""
    return parse_hosts(body, source)[0]


def parse_hosts(body: Any, source: str) -> list[Profile]:
    """Like ``load_hosts``, from a parsed YAML document; ``source`` heads the error."""
    if not isinstance(body, dict):
        raise ProfileError(source, [f"expected a mapping with host, model, production ..., got {type(body).__name__}"])
    body, undefined = expanded(body)
    problems = [
        f"{where} = '${{{variable}}}': the environment variable {variable} is not set (export {variable}=... "
        f"where Airflow's workers see it, or write the value, or a default as ${{{variable}:-value}})"
        for where, variables in undefined.items()
        for variable in variables
    ]
    profiles = []
    try:
        bodies = host_bodies(body)
    except ValueError as e:
        raise ProfileError(source, [*problems, str(e)]) from None
    for prefix, one in bodies:
        try:
            profiles.append(Profile.model_validate(one))
        except ValidationError as e:
            for d in e.errors():
                where = moved(path_of(d["loc"]), prefix, body)
                line = problem(d, where, Profile)
                if where not in undefined and line not in problems:
                    problems.append(line)
    if problems:
        raise ProfileError(source, problems)
    return profiles
