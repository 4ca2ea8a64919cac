"""What it does
  Brings production back where a run has lost the host: its lease lapsed, or the host was booted since, and no guard has
  done it yet. Where a run still holds the host, its guards are started again if they are gone. Nothing is done where
  nobody has borrowed the host, and production that hsx does not run is left to whoever runs it.
  Made for a unit at boot and for a timer; without --spec it goes by the run that was granted the host last.
Result: RestoreReport: restored, guarded or nothing.
Example
  python -m hsx_host recover
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from hsx_host import borrow, guards, lease, restore, serve, state
from hsx_host.contract import Lease, RestoreReport, RunSpec
from hsx_host.progress import log

HELP = "bring production back after a reboot, or where a lease has lapsed and no guard is left"


def add_arguments(parser: ArgumentParser) -> None:
    pass


def run(spec: RunSpec, args: Namespace) -> RestoreReport:
    restore.set_broken_aside(spec, leave=["hold.json"])  # that one keeps nobody from anything but borrowing
    held = lease.read(spec)
    if held is None and serve.mode_now(spec) != "extraction":
        return restore.report("nothing", "nobody has borrowed the host", serve.recorded_facts(spec))
    if held is not None and not lease.lapsed(held):
        guards.watch(spec)
        text = f"run {held.run_id} holds the host until {state.utc(held.expires)}; its guards live"
        return restore.report("guarded", text, serve.recorded_facts(spec))
    if held is not None:
        guards.watch(spec)  # they go on trying where this attempt fails
        log(f"run {held.run_id} has lost the host: production is brought back")
    return restore.proved(spec, borrow.give_back(spec, held or Lease(spec.run_id, 0.0, 0.0)))
