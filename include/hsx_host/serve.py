"""What it does
  serve production   the profile's production server runs, untouched and without the capture plugin.
  serve extraction   production is stopped, the plugin applied, the extraction server runs and has proved the plugin.
                     Needs this run's lease.
  serve stopped      no server of the profile runs. Needs this run's lease.
  Nothing is done where the host is there already (same launch, healthy, a real token). A production server that hsx did
  not start is taken over only where it is exactly the profile's; a stranger on the port is refused and never touched.
Result: ServerFacts.
Example
  python -m hsx_host serve production --spec S
"""

from __future__ import annotations

import time
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path

from hsx_host import (
    adopt,
    capture_server,
    guards,
    health,
    launch,
    lease,
    managers,
    patch,
    processes,
    procid,
    servers,
    state,
)
from hsx_host.contract import Lease, RunSpec, ServerFacts
from hsx_host.errors import Refused, TryAgain
from hsx_host.procid import ProcId
from hsx_host.progress import log
from hsx_host.state import ServerState

HELP = "bring the host to a mode: production, extraction or stopped"
MODES = ("production", "extraction", "stopped")
_PAUSES_S = (2.0, 10.0)  # between the tries to start production
_PATIENCE_S = 300.0  # how long a server that should be healthy may be too busy to say so


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("mode", choices=MODES)


def run(spec: RunSpec, args: Namespace) -> ServerFacts:
    return ensure(spec, args.mode)


def ensure(spec: RunSpec, mode: str, *, grant: Lease | None = None, by_hand: bool = False) -> ServerFacts:
    """Bring the host to ``mode`` from any state, crashed ones too; ``changed`` says whether anything was done.

    :param grant: a guard's or a recovery's: production comes back only where this grant has lapsed, and nobody else has
        the lease by then.
    :param by_hand: a person takes the host back, whoever holds it.
    """
    check_settings(spec, mode)
    wait_s = spec.production.start_timeout_s + spec.extraction.start_timeout_s
    with state.transition(spec, wait_s=wait_s, goal=mode):
        if not by_hand:
            _check_lease(spec, mode, grant)
        server = known(spec, memory_proved=mode != "production")
        if mode == "stopped":
            return _stopped(spec, server)
        if server is not None and _matches(spec, mode, server):
            ready = _still_ready(spec, server)
            if ready is not None:
                return facts(ready, changed=False)
        return _change(spec, mode, server)


def known(spec: RunSpec, *, memory_proved: bool = True) -> ServerState | None:
    """The recorded server where its main process lives; leftovers of one that does not live any more are removed."""
    server = state.read_server(spec)
    if server is None or server.phase == "stopped":
        return None
    if server.boot_id != procid.boot_id():
        state.journal(spec, "the host was booted since", mode=server.mode)
        return None
    if procid.alive(ProcId(server.pid, server.start)):
        return server
    state.journal(spec, "server found dead", mode=server.mode, server_pid=server.pid)
    launch.stop(spec, server, why="its main process is gone", memory_proved=memory_proved)
    return None


def extraction_spool(spec: RunSpec) -> Path:
    """The spool of the live extraction server. TryAgain where none runs."""
    server = state.read_server(spec)
    if (
        server is None
        or (server.mode, server.phase) != ("extraction", "running")
        or server.boot_id != procid.boot_id()
        or not procid.alive(ProcId(server.pid, server.start))
    ):
        raise TryAgain("no extraction server runs", field="mode", fix="serve extraction first")
    return Path(server.spool)


def mode_now(spec: RunSpec) -> str:
    """The mode of the recorded server if it lives, ``stopped`` if it does not, ``unknown`` where none is recorded."""
    server = state.read_server(spec)
    if server is None:
        return "unknown"
    here = server.phase != "stopped" and server.boot_id == procid.boot_id()
    return server.mode if here and procid.alive(ProcId(server.pid, server.start)) else "stopped"


def note_production(spec: RunSpec) -> None:
    """Record the production server that its owner started, before it is borrowed: what it runs with is what comes back,
    also where it dies before it is stopped. Refused where it is not the profile's, or a stranger holds its port, beside
    it too."""
    if mode_now(spec) not in ("production", "extraction"):
        with state.transition(spec, wait_s=30.0, goal="production"):
            found = adopt.production(spec) if mode_now(spec) in ("unknown", "stopped") else None
            if found is not None and not found.spool:
                launch.adopted(spec, found, spec.production.port)
    server = state.read_server(spec)
    if server is not None and mode_now(spec) == "production":
        adopt.refuse_company(spec, launch.owned(server))


def recorded_facts(spec: RunSpec) -> ServerFacts:
    """What the record says, whether or not that server lives."""
    server = state.read_server(spec)
    if server is None:
        return ServerFacts("unknown", False, 0, spec.production.port, "", 0.0, "", "")
    return facts(server, changed=False)


def require_production(spec: RunSpec) -> None:
    """TryAgain where the host is in another run's hands, or production gives no token: it can't be measured or asked
    then, and another run's extraction server is not it."""
    held, server = lease.read(spec), state.read_server(spec)
    if held is not None and held.run_id != spec.run_id and not lease.lapsed(held):
        raise lease.held_by(held)
    fix = "serve production first"
    if server is not None and (server.mode, server.phase) == ("extraction", "running"):
        raise TryAgain("the extraction server is up, production is not", field="mode", value=server.mode, fix=fix)
    if why := health.problem(spec.production):
        raise TryAgain(
            f"production does not serve: {why}", field="production", value=servers.url(spec.production), fix=fix
        )


def check_settings(spec: RunSpec, mode: str) -> None:
    """BadInput or Refused for settings under which a mode can't be served; looks at nothing but the spec."""
    managers.check(spec)
    servers.check_address(spec.production, "production")
    if mode == "extraction":
        servers.check_address(spec.extraction, "extraction")
        servers.check_extraction(spec.extraction)
        servers.check_model(spec.extraction, spec.model.path)


def facts(server: ServerState, *, changed: bool) -> ServerFacts:
    """The answer about a running server."""
    return ServerFacts(
        mode=server.mode,
        changed=changed,
        pid=server.pid,
        port=server.port,
        launch_hash=server.launch_hash,
        ready_s=server.ready_s,
        plugin_id=server.plugin_id,
        log=server.log,
    )


def _change(spec: RunSpec, mode: str, server: ServerState | None) -> ServerFacts:
    """Stop what runs, then start what should; in production mode a matching server on the port is taken over."""
    if mode == "extraction":
        _refuse_held_port(spec, server)
    if server is not None:
        _refuse_foreign_production(spec, mode, server)
        _stop(spec, mode, server)
    for found in _take_over(spec):
        ready = _still_ready(spec, found) if mode == found.mode == "production" else None
        if ready is not None:
            return facts(ready, changed=server is not None)
        _stop(spec, mode, found)
    if mode == "production":
        _refuse_in_the_way(spec)
        return facts(_production_again(spec), changed=True)
    port = launch.settings_of(spec, mode).port
    if pids := processes.listeners(port):
        raise adopt.stranger(port, pids)
    return facts(launch.start(spec, mode), changed=True)


def _stop(spec: RunSpec, mode: str, server: ServerState) -> None:
    """Stop a server on the way to ``mode``. Before production goes, what shall bring it back is looked at once more:
    minutes may have passed since the transition began."""
    if server.mode == "production" and mode != "production":
        adopt.refuse_company(spec, launch.owned(server))
        _check_lease(spec, mode, None)
    launch.stop(spec, server, why=f"the host goes to {mode}", memory_proved=mode != "production")


def _refuse_in_the_way(spec: RunSpec) -> None:
    """Who listens on another address than production's is in nobody's way."""
    if pids := processes.listeners(spec.production.port, spec.production.host):
        raise adopt.stranger(spec.production.port, pids)


def _production_again(spec: RunSpec) -> ServerState:
    """Start production, and again where it does not come back at the first try. The caller's error is the last one."""
    for attempt, pause_s in enumerate(_PAUSES_S, start=1):
        try:
            return launch.start(spec, "production")
        except TryAgain as e:
            why = e.doc.message.splitlines()[0]
            log(f"production did not come back (try {attempt} of {len(_PAUSES_S) + 1}): {why}")
            state.journal(spec, "production did not come back", attempt=attempt, why=why[:300])
            time.sleep(pause_s)
        _refuse_in_the_way(spec)
    try:
        return launch.start(spec, "production")
    except TryAgain as e:
        state.journal(spec, "production did not come back", attempt=len(_PAUSES_S) + 1, why=e.doc.message[:300])
        raise


def _stopped(spec: RunSpec, server: ServerState | None) -> ServerFacts:
    up = [server] if server is not None else []
    if server is not None:
        _refuse_foreign_production(spec, "stopped", server)
        _stop(spec, "stopped", server)
    for found in _take_over(spec):
        _stop(spec, "stopped", found)
        up.append(found)
    return ServerFacts("stopped", bool(up), 0, spec.production.port, "", 0.0, "", up[-1].log if up else "")


def _take_over(spec: RunSpec) -> Iterator[ServerState]:
    """Servers of this host that no record names: a lost extraction server, then production. Refuses strangers."""
    if lost := adopt.lost_extraction(spec):
        yield launch.adopted(spec, lost, spec.extraction.port)
    if found := adopt.production(spec):
        yield launch.adopted(spec, found, spec.production.port)


def _refuse_held_port(spec: RunSpec, server: ServerState | None) -> None:
    """Before production is stopped: an extraction port of its own must not be somebody else's."""
    port = spec.extraction.port
    if port == spec.production.port or (server is not None and server.port == port) or adopt.lost_extraction(spec):
        return
    if pids := processes.listeners(port):
        raise adopt.stranger(port, pids)


def _matches(spec: RunSpec, mode: str, server: ServerState) -> bool:
    if (server.mode, server.launch_hash) != (mode, launch.hash_of(spec, mode)):
        return False
    return mode == "production" or capture_server.same_capture(spec, server, patch.source_id())


def _still_ready(spec: RunSpec, server: ServerState) -> ServerState | None:
    """The record of a server that serves, None where it died or does not answer. One still starting is waited for."""
    settings = launch.settings_of(spec, server.mode)
    try:
        if server.phase == "starting":
            return _finish(spec, server)
        main = ProcId(server.pid, server.start)
        health.wait_until_ready(
            settings,
            alive=lambda: procid.alive(main),
            log_file=server.log,
            deadline_s=min(_PATIENCE_S, settings.start_timeout_s),
            what=server.mode,
            was_ready=True,
        )
        return server
    except TryAgain as e:
        log(f"the {server.mode} server does not serve, it is started anew: {e.doc.message.splitlines()[0]}")
        state.journal(spec, "server does not serve", mode=server.mode, server_pid=server.pid, why=e.doc.message[:300])
        return None


def _finish(spec: RunSpec, server: ServerState) -> ServerState:
    """Wait for a server whose starter is gone; stopped again where it must not be used."""
    try:
        return launch.finish(spec, server)
    except Refused:
        launch.stop(spec, server, why="the start failed", memory_proved=False)
        raise


def _check_lease(spec: RunSpec, mode: str, grant: Lease | None) -> None:
    held = lease.read(spec)
    live = held is not None and not lease.lapsed(held)
    if grant is not None:
        if held is not None and (live or not lease.same_grant(held, grant)):
            raise lease.held_by(held)
        if held is not None:
            state.journal(spec, "lease lapsed: the guard gives the host back", lapsed_at=held.expires)
        return
    if held is not None and live and held.run_id != spec.run_id:
        raise lease.held_by(held)
    if mode == "production":
        return
    if not live or held is None or held.run_id != spec.run_id:
        raise lease.not_held(spec, f", and {mode} without one would leave nobody to give the host back")
    guards.require(spec)


def _refuse_foreign_production(spec: RunSpec, mode: str, server: ServerState) -> None:
    """Production of another profile is not stopped for this one: its restore would bring this profile's back."""
    if (
        server.mode == "production"
        and mode != "production"
        and server.launch_hash != launch.hash_of(spec, "production")
    ):
        raise Refused(
            f"the production server that runs (pid {server.pid}) was launched by another profile, or before the "
            "profile was changed: a restore would bring something else back",
            field="production",
            value=server.launch_hash,
            fix="make it the profile's: serve production",
        )
