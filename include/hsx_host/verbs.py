"""Which module answers which verb. Modules are imported only when their verb is called, so that light verbs stay light.

A verb's module has ``HELP`` (one line), ``add_arguments(parser)`` and ``run(spec, args) -> document``; its docstring
is the long help text.
"""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from typing import Any, Protocol, cast

from hsx_host.contract import RunSpec

VERBS = {
    "preflight": "preflight",
    "plan": "plan",
    "disk": "disk",
    "cleanup": "cleanup",
    "benchmark": "benchmark",
    "acquire": "acquire",
    "heartbeat": "heartbeat",
    "release": "release",
    "serve": "serve",
    "patch": "patch",
    "probe": "probe",
    "extract": "extract",
    "verify": "verify",
    "convert": "convert",
    "vocab": "vocab",
    "handoff": "handoff",
    "top-up": "topup",
    "training-check": "training_check",
    "train": "train",
    "acceptance": "acceptance",
    "guard": "guard",
    "restore": "restore",
    "recover": "recover",
    "job": "job",
    "status": "status",
}


class Verb(Protocol):
    """What a verb's module offers."""

    HELP: str
    __doc__: str | None

    def add_arguments(self, parser: ArgumentParser) -> None: ...

    def run(self, spec: RunSpec, args: Namespace) -> Any: ...


def load(verb: str) -> Verb:
    """The module of a verb."""
    return cast(Verb, importlib.import_module(f"hsx_host.{VERBS[verb]}"))
