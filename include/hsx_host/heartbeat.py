"""What it does
  Renews the lease of the spec's run. Exit 75 where the run does not hold it (any more): it lapsed and the guard gave
  the host back, or another run has it.
Result: Lease.
Example
  python -m hsx_host heartbeat --spec S
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hsx_host import lease
from hsx_host.contract import Lease, RunSpec
from hsx_host.errors import TryAgain

HELP = "renew this run's lease"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> Lease:
    renewed = lease.renew(spec)
    if renewed is None:
        other = lease.read(spec)
        if other is not None:
            raise lease.held_by(other)
        raise TryAgain("this run holds no lease", field="lease", value=spec.run_id, fix="acquire the host first")
    return renewed
