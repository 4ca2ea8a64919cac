"""SGLang on a plain CPU: an out-of-tree platform, found through its entry point on PYTHONPATH.

Put this folder (the one that holds ``hsx_cpu`` and its ``.dist-info``) on the server's PYTHONPATH and start it
with ``--device cpu --attention-backend torch_native --sampling-backend pytorch --disable-cuda-graph``. The
in-tree CPU engine wants compiled AMX kernels; this one runs llama- and qwen-style models with torch alone.
"""

from __future__ import annotations


def activate() -> str:
    """Entry point of group ``sglang.srt.platforms``: the platform class by name, for SGLang to import."""
    return "hsx_cpu.platform.TorchCpuPlatform"
