"""The extraction server's side of the spool: its CaptureSpec, and the proof that every scheduler loaded the plugin."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

from hsx_host import formats, model_facts, procid, servers, state
from hsx_host.contract import ContractError, RunSpec, decode, encode
from hsx_host.errors import Refused
from hsx_host.fingerprint import engine_version
from hsx_host.spool import CaptureSpec, PluginReady

_KEEP_SPOOLS = 2


def capture_spec(spec: RunSpec, plugin_id: str, spool: Path) -> CaptureSpec:
    """What the plugin is told at start."""
    facts = model_facts.read_model(spec.model.path)
    return CaptureSpec(
        plugin_id=plugin_id,
        spool=str(spool),
        layers=sorted(spec.capture.layers),
        num_blocks=facts.num_blocks,
        hidden_size=facts.hidden_size,
        dtype=spec.capture.dtype,
        writers=spec.capture.writers,
        ring_bytes=spec.capture.ring_bytes,
        final=formats.primary(spec.capture.formats).NORM,
    )


def prepare_spool(spec: RunSpec, plugin_id: str, launch_hash: str) -> tuple[Path, Path]:
    """A new spool folder with its ``capture.json``: (spool, capture.json). Old spools go, the last two stay."""
    root = state.folder(spec, "spool")
    old = sorted((p for p in root.iterdir() if p.is_dir()), key=lambda p: p.stat().st_mtime)
    for path in old[: max(0, len(old) - _KEEP_SPOOLS)]:
        shutil.rmtree(path, ignore_errors=True)
    spool = state.folder(spec, "spool", f"{launch_hash}-{time.time_ns():x}")
    file = spool / "capture.json"
    state.write_document(file, capture_spec(spec, plugin_id, spool))
    return spool, file


def same_capture(spec: RunSpec, server: state.ServerState, plugin_id: str) -> bool:
    """Whether a recorded extraction server was told what the spec says now, and is of the SGLang that is installed now:
    one that an upgrade in place has outlived would give the new version's data set rows of the old one."""
    if not server.spool:
        return False
    spool = Path(server.spool)
    try:
        told = (spool / "capture.json").read_text().strip()
        outlived = any(one.sglang not in ("", engine_version()) for one in ready(spool))
    except (OSError, ContractError):
        return False
    return not outlived and told == encode(capture_spec(spec, plugin_id, spool))


def ready(spool: Path) -> list[PluginReady]:
    """What the schedulers of a server have said so far."""
    return [decode(PluginReady, p.read_bytes()) for p in sorted(spool.glob("ready-*.json"))]


def prove_ready(spec: RunSpec, spool: Path, plugin_id: str) -> dict[str, str]:
    """The seams; Refused unless every scheduler process has loaded this plugin and set exactly the asked layers."""
    try:
        said = ready(spool)
    except ContractError as e:
        raise _refused(f"a ready file does not fit: {e}", spool) from None
    for one in said:
        if one.error:
            raise _refused(f"the capture plugin in process {one.pid} says: {one.error}", spool)
        if one.plugin_id != plugin_id:
            raise _refused(f"process {one.pid} runs plugin {one.plugin_id[:12]}, not {plugin_id[:12]}", spool)
        if one.sglang != (installed := engine_version()):
            raise _refused(f"process {one.pid} runs SGLang {one.sglang}, host.python has {installed}", spool)
        if sorted(one.layers_to_capture) != sorted(spec.capture.layers):
            raise _refused(f"process {one.pid} captures {one.layers_to_capture}, not {spec.capture.layers}", spool)
    expected = servers.processes_of(spec.extraction)
    if len({one.pid for one in said}) < expected:
        raise _refused(f"{len(said)} of {expected} scheduler processes loaded the capture plugin", spool)
    return said[0].seams


def seams(spec: RunSpec) -> dict[str, str]:
    """The seams that the live extraction server has proved; empty where none runs."""
    server = state.read_server(spec)
    if server is None or server.mode != "extraction" or server.boot_id != procid.boot_id():
        return {}
    if not procid.alive(procid.ProcId(server.pid, server.start)):
        return {}
    return prove_ready(spec, Path(server.spool), server.plugin_id)


def _refused(message: str, spool: Path) -> Refused:
    return Refused(
        message, field="capture plugin", value=spool, fix="read the extraction server's log; is this SGLang supported?"
    )
