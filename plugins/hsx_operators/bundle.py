"""The program that is shipped to the host: ``hsx_host``, ``hsx_train`` and ``patches``, named by their content."""

from __future__ import annotations

import hashlib
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
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{len(files[name])}\0".encode())
        digest.update(files[name])
    return Bundle(sha256=digest.hexdigest(), files=dict(sorted(files.items())))
