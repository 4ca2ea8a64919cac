"""The variables of a server that the profile names: ``env``, and those of ``env_file``, which never leave the host."""

from __future__ import annotations

import os
import re
import stat

from hsx_host.contract import ServerSettings
from hsx_host.errors import BadInput

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def variables(settings: ServerSettings) -> dict[str, str]:
    """``env`` with the file's variables on top."""
    return settings.env | (read(settings.env_file) if settings.env_file else {})


def read(path: str) -> dict[str, str]:
    """The ``NAME=VALUE`` lines of a file; empty lines and ``#`` comments are left out, quotes around a value too.

    BadInput where it is missing, where others may read or change it, or where a line is something else.
    """

    def bad(message: str, fix: str) -> BadInput:
        return BadInput(message, field="production.env_file", value=path, fix=fix)

    try:
        with open(path, encoding="utf-8") as f:
            info = os.fstat(f.fileno())
            text = f.read()
    except (OSError, UnicodeDecodeError) as e:
        raise bad(f"can't be read: {getattr(e, 'strerror', None) or e}", "make it readable for this login") from None
    if info.st_uid not in (0, os.geteuid()) or stat.S_IMODE(info.st_mode) & 0o077:
        raise bad(
            f"others may read it (mode {stat.S_IMODE(info.st_mode):04o}, owner {info.st_uid})",
            "chmod 600, owned by this login",
        )
    found: dict[str, str] = {}
    for number, line in enumerate(text.split("\n"), start=1):
        line = line.strip().removeprefix("export ").strip()
        if not line or line.startswith("#"):
            continue
        name, equals, value = line.partition("=")
        if not equals or not _NAME.fullmatch(name):
            raise bad(f"line {number} is not NAME=VALUE", "one variable a line")
        if len(value) >= 2 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        found[name] = value
    return found
