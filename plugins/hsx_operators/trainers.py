"""Training in a profile, and from it to what the host program is told: the shipped commands of each trainer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from hsx_host import contract as c

Absolute = Annotated[str, Field(pattern=r"^/[^\x00\n]*$")]
Positive = Annotated[int, Field(ge=1)]


@dataclass(frozen=True)
class Shipped:
    """A trainer's command in two parts (``training.args`` stand between them) and the format that it reads."""

    format: str
    train: tuple[str, ...]
    then: tuple[str, ...] = ()


#: speculators by hsx's driver of its own training code; SpecForge by its own command line, and its export for SGLang.
SHIPPED = {
    "speculators": Shipped(
        "speculators_v1",
        ("{python}", "{bundle}/hsx_train/speculators_eagle3.py", "--verifier-name-or-path", "{model}", "--data-path",
         "{data}", "--save-path", "{checkpoints}", "--target-layer-ids", "{layers}"),
    ),
    "specforge": Shipped(
        "specforge",
        ("{python}", "-m", "specforge.cli", "train", "--config", "{specforge_config}"),
        ("&&", "{python}", "-m", "specforge.cli", "export", "--to", "sglang",
         "--checkpoint", "{checkpoints}/hsx-latest", "--draft-config", "{draft_config}", "--output-dir", "{drafter}"),
    ),
}  # fmt: skip


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid")


class TrainingHost(_Model):
    """Another host than the extraction's: its connection, the Python that has SGLang there, hsx's folder there."""

    ssh_conn_id: str = Field(min_length=1)
    python: Absolute
    home: Absolute


class Acceptance(_Model):
    """The benchmark behind a training. ``flags`` and ``env`` change production's, ``draft_*`` the drafter's server."""

    port: Annotated[int, Field(ge=1, le=65535)]
    prompts: Absolute | None = None
    samples: Positive = 32
    output_tokens: Positive = 128
    concurrency: Positive = 1
    steps: Annotated[int, Field(ge=1, le=16)] = 3
    minimum: Annotated[float, Field(ge=0)] = 0.0
    flags: dict[str, bool | int | float | str | list[str] | None] = {}
    env: dict[str, str | None] = {}
    draft_flags: list[str] = []
    draft_env: dict[str, str] = {}


class Training(_Model):
    """What ``hsx_training`` runs on a handed-off data set. ``command`` takes the place of the trainer's shipped one."""

    trainer: Literal["speculators", "specforge", "command"]
    output_root: Absolute
    python: Absolute | None = None
    command: list[str] = []
    args: list[str] = []
    format: str = ""
    env: dict[str, str] = {}
    host: TrainingHost | None = None
    acceptance: Acceptance | None = None

    @model_validator(mode="after")
    def _complete(self) -> Training:
        if self.trainer == "command" and not (self.command and self.format):
            raise ValueError("trainer: command needs training.command and training.format")
        return self


def training_settings(training: Training, python: str, acceptance: c.AcceptanceSettings | None) -> c.TrainingSettings:
    """The frozen settings of one training.

    :param python: the host program's Python, which stands in where ``training.python`` is not given.
    """
    shipped = SHIPPED.get(training.trainer)
    if training.command:
        command = [*training.command, *training.args]
    else:
        assert shipped is not None
        command = [*shipped.train, *training.args, *shipped.then]
    return c.TrainingSettings(
        name=training.trainer,
        command=command,
        format=training.format or (shipped.format if shipped else ""),
        root=training.output_root,
        python=training.python or python,
        env=dict(training.env),
        acceptance=acceptance,
    )
