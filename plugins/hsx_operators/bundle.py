"""The program that is shipped to the host: ``hsx_host``, ``hsx_train`` and ``patches``, named by their content."""

from __future__ import annotations

import hashlib
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hsx_operators import INCLUDE

ROOMS = ("hsx_host", "hsx_train", "patches")


@dataclass(frozen=True)
class Bundle:
    """``sha256`` over names and contents; ``files`` by their path inside the bundle, sorted."""

    sha256: str
    files: dict[str, bytes]

    @property
    def folders(self) -> list[str]:
        """Every folder of the bundle, parents first."""
        return sorted({str(p) for f in self.files for p in Path(f).parents if str(p) != "."})


def make_bundle(include: Path = INCLUDE) -> Bundle:
    """Read the rooms below ``include``; caches and byte code are left out.

    The hash runs over each file's path, length and bytes in the order of the paths, so that neither
    times nor the machine change it.
    """
    files: dict[str, bytes] = {}
    for room in ROOMS:
        for path in sorted((include / room).rglob("*")):
            inside = path.relative_to(include)
            hidden = any(part == "__pycache__" or part.startswith(".") for part in inside.parts)
            if path.is_file() and not hidden and path.suffix not in (".pyc", ".pyo"):
                files[inside.as_posix()] = path.read_bytes()
    if not any(name.startswith("hsx_host/") for name in files):
        raise FileNotFoundError(f"{include / 'hsx_host'} holds no program to ship")
    return Bundle(sha256=content_hash(files), files=dict(sorted(files.items())))


def content_hash(files: Mapping[str, bytes]) -> str:
    """What names a bundle."""
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return digest.hexdigest()


#: Ends with CHANGED where what lies in a shipped bundle (argv: its folder, its hash) isn't what its name says: all of
#: it, since Python would import from anywhere in it; links and other things that are no plain files are never shipped.
#: Left out are hidden names, and the ``__pycache__`` that a person's call may leave: ``verb_command`` reads none. It is
#: sent each time, so that nothing on the host decides about itself; the same hash as ``content_hash``.
_CHECK = """
import hashlib, os, stat, sys
root, wanted = sys.argv[1:]
files = {}
for where, folders, names in os.walk(root):
    folders[:] = [f for f in folders if f != "__pycache__" and not f.startswith(".")]
    for name in folders + names:
        path = os.path.join(where, name)
        mode = os.lstat(path).st_mode
        if name in folders and stat.S_ISDIR(mode) or name.startswith("."):
            continue
        if not stat.S_ISREG(mode):
            sys.exit(CHANGED)
        with open(path, "rb") as f:
            files[os.path.relpath(path, root)] = f.read()
digest = hashlib.sha256()
for name in sorted(files):
    digest.update(os.fsencode(name) + b"%c%d%c" % (0, len(files[name]), 0))
    digest.update(files[name])
sys.exit(0 if digest.hexdigest() == wanted else CHANGED)
"""
CHANGED = 9


def check_command(python: str, folder: str, sha256: str) -> str:
    """The remote command that ends with CHANGED where a shipped bundle isn't what its name says."""
    return shlex.join([python, "-I", "-S", "-c", _CHECK.replace("CHANGED", str(CHANGED)), folder, sha256])
