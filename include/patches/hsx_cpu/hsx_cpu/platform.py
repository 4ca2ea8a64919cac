"""The platform class for SGLang 0.5.14 and newer.

Two spots moved between versions and are guarded here: ``CpuDeviceMixin`` and ``PlatformCapabilities`` came after
0.5.14, and versions before them ask the platform for its KV pools and its allocator.
"""

from __future__ import annotations

import gc
from typing import Any

import psutil
import torch
from sglang.srt.platforms import interface
from sglang.srt.platforms.device_mixin import DeviceMixin, PlatformEnum

from hsx_cpu import linear

try:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
except ImportError:

    class CpuDeviceMixin(DeviceMixin):  # type: ignore[misc, no-redef]
        """What newer versions bring themselves: memory is the machine's, the rest of the device is a no-op."""

        device_name = "cpu"
        device_type = "cpu"

        def get_device_total_memory(self, device_id: int = 0) -> int:
            return int(psutil.virtual_memory().total)

        def get_current_memory_usage(self, device: torch.device | None = None) -> float:
            memory = psutil.virtual_memory()
            return float(memory.total - memory.available)

        def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
            memory = psutil.virtual_memory()
            return int(memory.available), int(memory.total)

        def get_device(self, device_id: int = 0) -> torch.device:
            return torch.device("cpu")

        def set_device(self, device: torch.device) -> None:
            return None

        def get_device_name(self, device_id: int = 0) -> str:
            return "cpu"

        def get_device_uuid(self, device_id: int = 0) -> str:
            return "cpu"

        def get_device_capability(self, device_id: int = 0) -> None:
            return None

        def empty_cache(self) -> None:
            gc.collect()

        def get_torch_distributed_backend_str(self) -> str:
            return "gloo"


class TorchCpuPlatform(CpuDeviceMixin, interface.SRTPlatform):  # type: ignore[misc]
    """A CPU without compiled kernels: torch-native attention, no device graphs, no pinned memory."""

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"
    if hasattr(interface, "PlatformCapabilities"):
        capabilities = interface.PlatformCapabilities()

    def init_backend(self) -> None:
        linear.install()  # SGLang's seam for a platform's own kernels

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def support_cuda_graph(self) -> bool:
        return False

    def support_piecewise_cuda_graph(self) -> bool:
        return False

    # ---- EAGLE-3 with chains (see eagle.py); SGLang 0.5.23 is the version that asks

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm == "EAGLE3"

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == "torch_native"

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return "torch_native"

    def get_speculative_worker_cls(self, algorithm: str) -> None:
        from hsx_cpu import eagle

        eagle.install()  # the worker is SGLang's own

    def get_speculative_cache_locs_fn(self) -> Any:
        from hsx_cpu import eagle

        return eagle.cache_locs

    if not hasattr(interface.SRTPlatform, "get_kv_pool_cls"):
        # Older versions ask each out-of-tree platform for its pools; newer ones warn where these names exist.

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool  # type: ignore[no-any-return]

        def get_mla_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            return MLATokenToKVPool  # type: ignore[no-any-return]

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator

            return PagedTokenToKVPoolAllocator  # type: ignore[no-any-return]
