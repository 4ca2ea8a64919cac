"""The JSON documents between ``extract`` and the capture plugin inside the SGLang server.

They are files in one spool folder; the plugin writes and reads the same shapes without importing
this module (``include/patches`` knows nothing of hsx_host).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class CaptureSpec:
    """``HSX_CAPTURE_SPEC`` names a file with this. Only requests whose rid begins with ``rid_prefix`` count.

    ``final``: whether the final hidden state is taken ``before`` or ``after`` the final norm.
    """

    plugin_id: str
    spool: str
    layers: list[int]
    num_blocks: int
    hidden_size: int
    dtype: str
    writers: int
    ring_bytes: int
    rid_prefix: str = "hsx-"
    final: str = "before"


@dataclass(frozen=True)
class Plane:
    """Where one plane's rows go: row r at ``offset + r * row_stride``, ``hidden_size`` elements each."""

    name: str
    offset: int
    row_stride: int


@dataclass(frozen=True)
class CaptureRequest:
    """``<spool>/<rid>.json``, written by the client before it posts. Planes: layers in ascending order, then ``final``.

    Planes are named ``layer_<k>`` and ``final``. ``ids_crc32`` (here and in the record) runs over the ids as
    little-endian int64, in row order.
    """

    rid: str
    path: str
    tokens: int
    ids_crc32: int
    planes: list[Plane]


@dataclass(frozen=True)
class PlaneRecord:
    """What the plugin wrote of one plane. ``crc32`` runs over the plane's rows in row order; planes that lie side by
    side in each row have one together, over the rows as the file has them, which stands at each of them."""

    name: str
    crc32: int
    finite: bool
    zero: bool
    constant: bool


@dataclass(frozen=True)
class CaptureRecord:
    """``<spool>/<rid>.done.json``, written by the plugin last. ``error``: empty, or why the sample is not complete."""

    rid: str
    rows: int
    bytes: int
    chunks: int
    ids_crc32: int
    planes: list[PlaneRecord]
    error: str = ""


@dataclass(frozen=True)
class PluginReady:
    """``<spool>/ready-<pid>.json``, written by each scheduler process once the model is loaded, every seam proved."""

    plugin_id: str
    pid: int
    tp_rank: int
    sglang: str
    model_class: str
    layers_to_capture: list[int]
    num_blocks: int
    hidden_size: int
    norm_class: str
    norm_eps: float
    seams: dict[str, str]
    error: str = ""
