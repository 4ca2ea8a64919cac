"""The command that a person on the host uses: ``<home>/hsx_host VERB``, whatever program a run shipped last."""

from __future__ import annotations

import contextlib
import os
import pwd
import shlex
import sys

from hsx_host import program, state
from hsx_host.contract import RunSpec
from hsx_host.errors import Refused, TryAgain

NAME = "hsx_host"
HOME_VARIABLE = "HSX_HOME"


def install(spec: RunSpec) -> None:
    """Write the command for this program and home; a disk that takes none keeps no run from going on."""
    home = state.home(spec)
    own = {HOME_VARIABLE: str(home), **program.variables(home)}
    words = [*(f"{name}={value}" for name, value in own.items()), sys.executable, "-m", "hsx_host"]
    text = (
        "#!/bin/sh\n"
        "# hsx on this host: status, restore --now, recover, restore --lift; --help says more.\n"
        f'exec env {shlex.join(words)} "$@"\n'
    )
    path = state.home(spec) / NAME
    with contextlib.suppress(OSError, TryAgain):
        if not path.exists() or path.read_text() != text:
            state.write_text(path, text, mode=0o700)


def check_login(spec: RunSpec, verb: str) -> None:
    """Refused for another login than hsx's own, root included: what it started would be this login's, production too,
    and out of hsx's reach. The folder that hsx made itself says whose it is; the home may be anybody's."""
    try:
        owner = os.stat(state.home(spec) / "state").st_uid
    except OSError:
        return  # no run has had this host yet, or this login may not look in
    if owner == os.geteuid():
        return
    mine = user(os.geteuid())
    raise Refused(
        f"hsx works here as {user(owner)}, this is {mine}: what {verb} starts would be {mine}'s, production too",
        field="login",
        value=mine,
        fix=f"sudo -u {shlex.quote(user(owner))} {shlex.quote(str(state.home(spec) / NAME))} {verb} ...",
    )


def user(uid: int) -> str:
    """A user by name, as sudo takes it; ``#1234`` where nobody has one for it."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"#{uid}"
