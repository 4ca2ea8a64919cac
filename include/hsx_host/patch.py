"""What it does
  patch apply    puts the capture plugin's folder in place, named by its content; the installed SGLang is not touched.
  patch verify   checks every installed file of SGLang against the hashes of its RECORD (changed, missing and added
                 files are named), and the seams that the live extraction server has proved, where one runs.
  patch revert   removes the plugin's folder. Refused while the extraction server runs.
  apply and revert check the RECORD too: before and after.
Result: PatchReport. Exit 3 where SGLang is not as it was installed.
Example
  python -m hsx_host patch verify --spec S
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import os
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from hsx_host import capture_server, procid, state
from hsx_host.contract import PatchReport, RunSpec
from hsx_host.errors import BadInput, Refused

HELP = "put the capture plugin in place, prove that SGLang is untouched, take the plugin away"
PLUGIN = "hsx_capture"


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("action", choices=["apply", "verify", "revert"])


def run(spec: RunSpec, args: Namespace) -> PatchReport:
    plugin_id, where, seams = "", "", {}
    if args.action == "apply":
        plugin_id, folder = apply(spec)
        where = str(folder)
    elif args.action == "revert":
        with state.transition(spec, wait_s=60.0):
            revert(spec)
    else:
        plugin_id = source_id()
        folder = plugin_dir(spec, plugin_id)
        where = str(folder) if folder.exists() else ""
        seams = capture_server.seams(spec)
    version, checked = check_installed()
    return PatchReport(
        plugin_id=plugin_id, plugin_dir=where, sglang=version, files_checked=checked, pristine=True, seams=seams
    )


def apply(spec: RunSpec) -> tuple[str, Path]:
    """Copy the bundle's plugin to ``<home>/plugin/<plugin_id>/hsx_capture``; the id and the folder for PYTHONPATH."""
    plugin_id = source_id()
    target = plugin_dir(spec, plugin_id)
    if target.exists() and tree_id(target) == plugin_id:
        return plugin_id, target
    parent = state.folder(spec, "plugin")
    temporary = parent / f".{plugin_id}.{os.getpid()}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    _copy(_source(), temporary / PLUGIN)
    shutil.rmtree(target.parent, ignore_errors=True)  # another content under this id: someone edited the copy
    os.rename(temporary, target.parent)
    state.journal(spec, "plugin applied", plugin_id=plugin_id)
    return plugin_id, target


def revert(spec: RunSpec) -> None:
    """Remove every applied plugin folder; Refused while an extraction server lives. The caller holds the transition."""
    server = state.read_server(spec)
    if (
        server is not None
        and server.mode == "extraction"
        and server.boot_id == procid.boot_id()
        and procid.alive(procid.ProcId(server.pid, server.start))
    ):
        raise Refused(
            "the extraction server runs with the plugin", field="mode", value="extraction", fix="serve production first"
        )
    folder = state.home(spec) / "plugin"
    if folder.exists():
        shutil.rmtree(folder)
        state.journal(spec, "plugin reverted")


def plugin_dir(spec: RunSpec, plugin_id: str) -> Path:
    """Where a plugin of this content lies once it is applied: an entry for PYTHONPATH."""
    return state.home(spec) / "plugin" / plugin_id / PLUGIN


def source_id() -> str:
    """The plugin id of the bundle that this program is a part of."""
    if not _source().is_dir():
        raise BadInput(
            "the bundle holds no capture plugin", field="bundle", value=_source(), fix="ship the bundle again"
        )
    return tree_id(_source())


def _copy(source: Path, target: Path) -> None:
    """Copy a folder's files; ends with the first OSError, whose errno says what is wrong (copytree hides it)."""
    for path in _files(source):
        new = target / path.relative_to(source)
        new.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, new)


def _files(folder: Path) -> list[Path]:
    """A folder's files by name, byte code left out."""
    found = (p for p in folder.rglob("*") if p.is_file())
    return sorted(p for p in found if "__pycache__" not in p.parts and p.suffix != ".pyc")


def tree_id(folder: Path) -> str:
    """SHA-256 over the relative names and the contents of a folder's files, byte code left out."""
    digest = hashlib.sha256()
    for path in _files(folder):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{path.relative_to(folder).as_posix()}\0{content}\n".encode())
    return digest.hexdigest()


def check_installed(name: str = "sglang") -> tuple[str, int]:
    """Every installed file of a distribution against its RECORD; its version and how many files were checked.

    Refused names what is changed, missing, or lies in the package without being in the RECORD (Python files).
    The RECORD format is the packaging specification's "Recording installed projects": sha256, urlsafe base64, unpadded.
    """
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        raise BadInput(
            f"{name} is not installed in the Python that runs hsx", field="host.python", fix="name SGLang's Python"
        ) from None
    changed, missing, checked, known = [], [], 0, set()
    packages: set[Path] = set()
    for entry in found.files or []:
        path = Path(str(entry.locate()))
        known.add(path)
        if entry.parts[0] == name:
            packages.add(Path(str(found.locate_file(name))))
        if entry.hash is None:
            continue
        if not path.is_file():
            missing.append(str(entry))
            continue
        checked += 1
        if _digest(path, entry.hash.mode) != entry.hash.value:
            changed.append(str(entry))
    added = [str(p) for root in packages for p in root.rglob("*.py") if p not in known]
    if not checked or not packages:
        raise Refused(
            f"{name} has no RECORD that could prove it (an editable install?)",
            field=name,
            value=found.version,
            fix="install it from a wheel",
        )
    if changed or missing or added:
        parts = (("changed", changed), ("missing", missing), ("added", added))
        text = "; ".join(f"{what}: {', '.join(sorted(names)[:10])}" for what, names in parts if names)
        count = len(changed) + len(missing) + len(added)
        raise Refused(
            f"the installed {name} is not what its RECORD says ({count} files): {text}",
            field=name,
            value=found.version,
            fix=f"install {name} {found.version} again; hsx never edits it",
        )
    return found.version, checked


def _digest(path: Path, mode: str) -> str:
    with path.open("rb") as f:
        raw = hashlib.file_digest(f, mode).digest()
    return base64.urlsafe_b64encode(raw).rstrip(b"=").decode()


def _source() -> Path:
    return Path(__file__).resolve().parents[1] / "patches" / PLUGIN
