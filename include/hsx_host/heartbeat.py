"""What it does
  Renews the lease of the spec's run and starts its guards again where they are gone. Exit 75 where the run does not
  hold it (any more): it lapsed and the guard gives the host back, or another run has it.
Result: Lease.
Example
  python -m hsx_host heartbeat --spec S
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hsx_host import guards, lease
from hsx_host.contract import Lease, RunSpec

HELP = "renew this run's lease"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> Lease:
    renewed = guards.renew(spec)
    if renewed is None:
        raise lease.not_held(spec, "")
    return renewed
