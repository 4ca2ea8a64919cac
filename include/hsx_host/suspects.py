"""Samples that were in flight when the server died: the next call asks for each of them alone, before the rest.

One sample can kill a server at every try. Whoever was in flight at a death is a suspect; a suspect that is alone in
flight at another death goes to the ledger and is not asked again in this run. Another run tries it once more.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

from hsx_host import state

ENOUGH = 2  # deaths


@dataclass(frozen=True)
class Suspect:
    """One row. ``ids_hash``: of which sample; ``alone``: at the last of its deaths nothing else was in flight."""

    row: int
    ids_hash: str
    deaths: int
    alone: bool
    run_id: str
    why: str

    def guilty(self, run_id: str) -> bool:
        """Whether this run asks for it no more."""
        return self.alone and self.deaths >= ENOUGH and self.run_id == run_id

    @property
    def reason(self) -> str:
        """For the ledger."""
        return (
            f"the server died {self.deaths} times while this sample was in flight, the last time with nothing else: "
            f"{self.why}"
        )


@dataclass(frozen=True)
class Suspects:
    """``shards/<id>/suspects.json``; no file: the server never died."""

    samples: list[Suspect] = field(default_factory=list)


def read(path: Path, hashes: dict[int, bytes]) -> dict[int, Suspect]:
    """Suspects by row, less those whose row is another sample now (``hashes``: identity by row).

    They only save tries: a file that can't be read keeps no shard from being extracted.
    """
    found = state.read_or_none(Suspects, path) or Suspects()
    return {s.row: s for s in found.samples if s.row in hashes and hashes[s.row].hex() == s.ids_hash}


def died(known: dict[int, Suspect], flying: Iterable[tuple[int, bytes]], run_id: str, why: str) -> dict[int, Suspect]:
    """What is suspected after a death with these rows (and identities) in flight."""
    rows = list(flying)
    after = dict(known)
    for row, identity in rows:
        before = known.get(row) or Suspect(row, identity.hex(), 0, False, run_id, why)
        after[row] = replace(before, deaths=before.deaths + 1, alone=len(rows) == 1, run_id=run_id, why=why)
    return after


def write(path: Path, known: Iterable[Suspect]) -> None:
    """Keep the suspects; without any, the file goes."""
    rows = sorted(known, key=lambda s: s.row)
    if rows:
        state.write_document(path, Suspects(rows))
    else:
        path.unlink(missing_ok=True)
