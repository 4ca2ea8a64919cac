"""The stages of a borrowed host at which a fault can strike, each brought about by real verbs and held there."""

from __future__ import annotations

import time
from dataclasses import dataclass

from fault_host import FaultHost, until

Verb = tuple[str, ...]

ACQUIRE: Verb = ("acquire",)
STOP: Verb = ("serve", "stopped")
EXTRACTION: Verb = ("serve", "extraction")
EXTRACT: Verb = ("extract", "--shard", "0")
PRODUCTION: Verb = ("serve", "production")
PUBLISHED_AT_STRIKE = 30


@dataclass(frozen=True)
class Stage:
    """Where a run stands.

    :param before: verbs that have ended.
    :param verb: the detached verb that is at work, none between two steps.
    :param hold: what keeps it there (see the stand-in's control files).
    :param event: journal line, and the server's mode, that tell that it is there.
    """

    name: str
    before: tuple[Verb, ...]
    verb: Verb = ()
    hold: str = ""
    event: tuple[str, str] = ("", "")

    def bring(self, host: FaultHost) -> str:
        """Bring the host to this stage; the id of the job at work, "" where none is."""
        for verb in self.before:
            said = host.run(*verb) if verb[0] == "serve" else host.ok(*verb)
            assert said.rc == 0, said
        if not self.verb:
            return ""
        lines = len(host.journal())
        host.hold(self.hold)
        job = host.start(*self.verb)
        if self.verb == EXTRACT:
            until(lambda: host.published() >= PUBLISHED_AT_STRIKE, host.story)
        else:
            event, mode = self.event
            until(lambda: host.told(event, lines, mode=mode), host.story)
        return job


UP = (ACQUIRE, EXTRACTION)
STAGES = [
    Stage("lease held", (ACQUIRE,)),
    Stage("production stopping", (ACQUIRE,), STOP, "production-stop", ("stopping server", "production")),
    Stage("production stopped", (ACQUIRE, STOP)),
    Stage("extraction starting", (ACQUIRE,), EXTRACTION, "extraction-start", ("server started", "extraction")),
    Stage("extraction up", UP),
    Stage("extracting", (("plan",), ACQUIRE, EXTRACTION), EXTRACT, f"capture-{PUBLISHED_AT_STRIKE + 10}"),
    Stage("extraction stopping", UP, PRODUCTION, "extraction-stop", ("stopping server", "extraction")),
    Stage("production starting", UP, PRODUCTION, "production-start", ("server started", "production")),
    Stage("production back", (*UP, PRODUCTION)),
]  # fmt: skip
AT = {stage.name: stage for stage in STAGES}


def give_back(host: FaultHost) -> None:
    """What the DAG's restore teardown does."""
    said = host.run("restore")
    assert said.rc == 0, said


def next_run(host: FaultHost) -> None:
    """Another run wants the host: it waits until production is back and the lease free, and gives the host back."""
    spec = host.another("run-2")
    while (said := host.verb("acquire", spec=spec)).rc == 75:
        time.sleep(0.5)
    assert said.rc == 0, said
    host.ok("restore", spec=spec)
