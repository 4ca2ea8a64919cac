"""What extraction took on this host before: the measured rate, and for how long production was down around it.

Each call of ``extract`` that published something leaves one line in ``state/pace.jsonl``; the journal says when
production was stopped and when it was ready again. Both are only for foretelling: nothing else rests on them.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from hsx_host import state
from hsx_host.contract import Pace, RunSpec

_SHARDS = 50  # the rate is that of the last so many shards
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Stint:
    """One shard's extraction, from its first request to its last: unix seconds."""

    profile: str
    run_id: str
    tokens: int
    begun: float
    ended: float


def keep(spec: RunSpec, tokens: int, begun: float, ended: float) -> None:
    """Note what one call of ``extract`` did."""
    line = Stint(spec.profile, spec.run_id, tokens, round(begun, 3), round(ended, 3))
    with _file(spec).open("a") as f:
        f.write(json.dumps(asdict(line)) + "\n")


def measured(spec: RunSpec) -> Pace | None:
    """The pace of the spec's profile on this host, None before its first shard."""
    stints = [Stint(**body) for body in _lines(_file(spec)) if body.get("profile") == spec.profile]
    return pace_of(stints, _lines(state.folder(spec, "state") / "journal.jsonl"))


def pace_of(stints: list[Stint], journal: Iterable[dict[str, Any]]) -> Pace | None:
    """Tokens of the last shards by their seconds, and what production's last absence took beside extracting.

    Shards of two hosts, or two at once, may overlap: their time is counted once.
    """
    last = stints[-_SHARDS:]
    seconds = _union([(s.begun, s.ended) for s in last])
    if not seconds:
        return None
    overhead = 0.0
    for begun, ended in _absences(journal):
        inside = [(max(s.begun, begun), min(s.ended, ended)) for s in stints if s.begun < ended and s.ended > begun]
        if inside:
            overhead = ended - begun - _union(inside)
    tokens = sum(s.tokens for s in last)
    return Pace(
        tok_s=round(tokens / seconds, 1), tokens=tokens, shards=len(last), overhead_s=round(overhead, 1),
        at=last[-1].ended,
    )  # fmt: skip


def _absences(journal: Iterable[dict[str, Any]]) -> Iterable[tuple[float, float]]:
    """From production's stop to its next readiness."""
    begun: float | None = None
    for line in journal:
        event, mode = line.get("event"), line.get("mode")
        if event == "stopping server" and mode == "production" and begun is None:
            begun = float(line["time"])
        elif begun is not None and event == "server ready" and mode == "production":
            yield begun, float(line["time"])
            begun = None


def _union(spans: list[tuple[float, float]]) -> float:
    total, until = 0.0, float("-inf")
    for begun, ended in sorted(spans):
        total += max(0.0, ended - max(begun, until))
        until = max(until, ended)
    return total


def _file(spec: RunSpec) -> Path:
    return state.folder(spec, "state") / "pace.jsonl"


def _lines(path: Path) -> list[dict[str, Any]]:
    """The last lines of a file of JSON objects; a torn line, or one of another shape, is left out."""
    try:
        with path.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - _READ_BYTES))
            raw = f.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for text in raw:
        try:
            body = json.loads(text)
        except ValueError:
            continue
        if isinstance(body, dict):
            found.append(body)
    return found
