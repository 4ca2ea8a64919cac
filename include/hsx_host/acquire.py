"""What it does
  Gives the lease on the host to the spec's run and starts the guard that gives the host back if the lease lapses.
  The same run may acquire again (its lease is renewed); another run gets exit 75 with the holder's name; a lapsed
  lease is taken over.
Result: Lease.
Example
  python -m hsx_host acquire --spec S
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hsx_host import borrow
from hsx_host.contract import Lease, RunSpec

HELP = "take the lease on the host for this run, and start its guard"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> Lease:
    return borrow.acquire(spec, by_step=False)
