"""The one seam to the GPU driver: ``nvidia-smi`` of PATH. Without it, or without a driver, the host has no devices."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass

from hsx_host.errors import TryAgain

_TIMEOUT_S = 60
# nvidia-smi's manual, "Return Value": no such object (no device), the driver is not loaded, its library is not found.
_NO_DRIVER = (6, 9, 12)


@dataclass(frozen=True)
class DeviceUse:
    """GPU memory that the driver counts for one process."""

    pid: int
    mebibytes: int


def compute_apps() -> list[DeviceUse]:
    """Processes with memory on any device. The driver may not know an amount ("[N/A]"): it counts as 0."""
    uses = []
    for line in _query("--query-compute-apps=pid,used_memory"):
        pid, _, amount = line.partition(",")
        uses.append(DeviceUse(int(pid), int(amount) if amount.strip().isdigit() else 0))
    return uses


def names() -> list[str]:
    """One text a device: its name and memory in MiB."""
    return [line.replace(",", " ") + " MiB" for line in _query("--query-gpu=name,memory.total")]


def _query(what: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run(
            [program, what, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        raise TryAgain(
            f"nvidia-smi does not answer within {_TIMEOUT_S} s", field="devices", fix="look after the driver"
        ) from None
    if answer.returncode in _NO_DRIVER:  # installed where no driver is: no process can hold device memory
        return []
    if answer.returncode != 0:
        said = " ".join((answer.stdout + answer.stderr).split())[:200]
        raise TryAgain(
            f"nvidia-smi ends with {answer.returncode}: {said}", field="devices", fix="look after the driver"
        )
    return [line.strip() for line in answer.stdout.splitlines() if line.strip()]
