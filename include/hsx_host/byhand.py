"""The command that a person on the host uses: ``<home>/hsx_host VERB``, whatever program a run shipped last."""

from __future__ import annotations

import contextlib
import shlex
import sys

from hsx_host import program, state
from hsx_host.contract import RunSpec
from hsx_host.errors import TryAgain

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
