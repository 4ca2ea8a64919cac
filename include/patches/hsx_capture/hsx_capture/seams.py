"""Puts the seams in place and proves them, once a scheduler has loaded its model.

SGLang logs and ignores a plugin that raises and a hook whose target does not resolve, so each scheduler process
writes ``ready-<pid>.json``: what is proved, or why nothing is captured. Whoever started the server must read it.
"""

from __future__ import annotations

import inspect
import logging
import os
from pathlib import Path
from typing import Any

from hsx_capture import spec

log = logging.getLogger("hsx_capture")

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"
OLDEST = "0.5.11"
_LOGITS_ARGS = ["self", "input_ids", "hidden_states", "lm_head", "logits_metadata", "aux_hidden_states"]


class Seams:
    """One process's hooks. ``before_logits`` does nothing until a loaded model has been proved."""

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        self._collector: Any = None

    def before_logits(self, *args: Any, **kwargs: Any) -> None:
        """Hook before ``LogitsProcessor.forward``."""
        if self._collector is not None:
            self._collector.on_logits(*args, **kwargs)

    def after_load_model(self, result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        """Hook after ``ModelRunner.load_model``: set, prove, arm, and say so."""
        if getattr(runner, "is_draft_worker", False):
            return
        facts: dict[str, Any] = {"plugin_id": "", "pid": os.getpid(), "tp_rank": -1, "sglang": ""}
        facts |= {"model_class": type(runner.model).__name__, "layers_to_capture": [], "num_blocks": 0}
        facts |= {"hidden_size": 0, "norm_class": "", "norm_eps": 0.0, "seams": {}}
        spool, error = self._path.parent, ""
        try:
            wanted = spec.read(spec.CaptureSpec, self._path)
            spool = Path(wanted.spool)
            facts["plugin_id"] = wanted.plugin_id
            self._arm(wanted, runner, facts)
            log.info("capturing layers %s into %s", wanted.layers, spool)
        except Exception as e:
            self._collector = None
            error = f"{type(e).__name__}: {e}"
            log.exception("nothing is captured")
        try:
            spec.write(spec.PluginReady(**facts, error=error), spool / f"ready-{os.getpid()}.json")
        except OSError:
            log.exception("the ready file can't be written")

    def _arm(self, wanted: spec.CaptureSpec, runner: Any, facts: dict[str, Any]) -> None:
        import torch

        from hsx_capture import checksum, model
        from hsx_capture.collect import Collector
        from hsx_capture.ring import Ring
        from hsx_capture.writer import Writers

        seams: dict[str, str] = facts["seams"]
        facts["sglang"] = _version()
        facts["tp_rank"], first = _rank(runner)
        _refuse_launch(runner)
        target = model.find(runner.model)
        facts.update(
            num_blocks=target.num_blocks, hidden_size=target.hidden_size, norm_eps=target.norm_eps,
            norm_class=type(target.inner.norm).__name__,
        )  # fmt: skip
        for name in ("num_blocks", "hidden_size"):
            if getattr(wanted, name) != facts[name]:
                raise model.SeamError(f"CaptureSpec.{name} = {getattr(wanted, name)}: the model has {facts[name]}")
        dtype = getattr(torch, wanted.dtype, None)
        if not isinstance(dtype, torch.dtype) or dtype != target.inner.norm.weight.dtype:
            raise model.SeamError(f"CaptureSpec.dtype = {wanted.dtype}: the model has {target.inner.norm.weight.dtype}")
        seams["ModelRunner.load_model"] = "applied"
        seams["LogitsProcessor.forward"] = self._prove_logits_hook(target.owner.logits_processor)
        model.set_layers(target, wanted.layers)
        facts["layers_to_capture"] = target.layers_now()
        seams["layers_to_capture"] = f"{type(target.inner).__name__}: read back"
        device = target.inner.norm.weight.device
        seams["norm"] = f"{facts['norm_class']}: formula holds to {model.prove_norm(target, dtype, device):.4f}"
        if not first:
            seams["writer"] = "another rank of this tensor-parallel group"
            return
        if wanted.writers < 1:
            raise model.SeamError(f"CaptureSpec.writers = {wanted.writers}: expected 1 or more")
        ring = Ring(wanted.ring_bytes, len(wanted.layers) + 1, target.hidden_size, dtype, device)
        writers = Writers(wanted.writers, Path(wanted.spool), ring.row_bytes)
        collector = Collector(wanted, target, ring, writers)
        handle = target.inner.norm.register_forward_hook(collector.on_norm)
        if target.inner.norm._forward_hooks.get(handle.id) != collector.on_norm:
            raise model.SeamError("the forward hook of the final norm is not in place")
        seams["norm.forward"] = "hooked"
        _save_norm(target.inner.norm.weight, target.norm_eps, Path(wanted.spool))
        seams["writer"] = f"this rank, {ring.slot_rows} rows a slot"
        seams["checksum"] = f"CRC-32 of {checksum.SOURCE}"
        self._collector = collector

    def _prove_logits_hook(self, processor: Any) -> str:
        """Walk the wrappers of the live logits processor's ``forward`` until this object's hook is found."""
        function = type(processor).forward
        names = list(inspect.signature(function).parameters)[: len(_LOGITS_ARGS)]
        if names != _LOGITS_ARGS:
            raise RuntimeError(f"LogitsProcessor.forward takes {names}, expected {_LOGITS_ARGS}")
        if "forward" in vars(processor):
            raise RuntimeError("the model's logits processor has a forward of its own, which the hook does not see")
        while function is not None:
            if any(cell.cell_contents == self.before_logits for cell in getattr(function, "__closure__", None) or ()):
                return f"applied to {type(processor).__name__}"
            function = getattr(function, "__wrapped__", None)
        raise RuntimeError(f"the hook on {LOGITS} is not in place")


def register(path: str) -> None:
    """Register the hooks with SGLang; ``path`` is the spec's file."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = Seams(path)
    HookRegistry.register(LOAD_MODEL, seams.after_load_model, HookType.AFTER)
    HookRegistry.register(LOGITS, seams.before_logits, HookType.BEFORE)


def _version() -> str:
    import sglang
    from packaging.version import InvalidVersion, Version

    found = str(sglang.__version__)
    try:
        old = Version(found) < Version(OLDEST)
    except InvalidVersion:
        old = False  # a build from source; its seams are proved by name like any other's
    if old:
        raise RuntimeError(f"SGLang {found} is too old: capture needs {OLDEST} or newer")
    return found


def _rank(runner: Any) -> tuple[int, bool]:
    """The tensor-parallel rank, and whether this process is the first of those that hold the same rows.

    With attention data parallelism every attention group has rows of its own, so its first rank counts.
    """
    try:
        from sglang.srt.runtime_context import get_parallel

        parallel = get_parallel()
        tp, attention, context = parallel.tp_rank, parallel.attn_tp_rank, parallel.attn_cp_size
    except (ImportError, AttributeError):
        from sglang.srt.layers import dp_attention

        tp, attention = runner.tp_rank, dp_attention.get_attention_tp_rank()
        context = getattr(dp_attention, "get_attention_cp_size", lambda: 1)()
    if context > 1:
        raise RuntimeError(f"attention context parallelism of {context} splits a sample's rows: start without it")
    return int(tp), attention == 0


def _refuse_launch(runner: Any) -> None:
    """Refuse launch settings under which rows would be missing or would not be the prompt's."""
    args = runner.server_args
    if not args.disable_radix_cache:
        raise RuntimeError("the radix cache is on: cached tokens have no rows; start with --disable-radix-cache")
    if args.speculative_algorithm:
        raise RuntimeError(f"speculative decoding ({args.speculative_algorithm}) is on: start without it")
    if args.disaggregation_mode != "null":
        raise RuntimeError(f"disaggregation mode {args.disaggregation_mode} is on: start without it")
    if args.pp_size > 1:
        raise RuntimeError(f"pipeline parallelism of {args.pp_size} is on: start with --pp-size 1")
    if getattr(runner, "startup_weight_load", None) is not None:
        raise RuntimeError("weights are still being loaded (overlapped start): start without it")
    if not _eager_prefill(args):
        raise RuntimeError("CUDA graphs are on for prefill: start with --disable-cuda-graph")


def _eager_prefill(args: Any) -> bool:
    try:
        from sglang.srt.model_executor.cuda_graph_config import check_cuda_graph_backend
    except ImportError:  # before 0.5.14
        return bool(args.disable_cuda_graph)
    return bool(check_cuda_graph_backend("prefill", "disabled"))


def _save_norm(weight: Any, eps: float, spool: Path) -> None:
    """``final_norm.safetensors``: ``weight`` in the model's dtype and ``eps`` as a 1-element float64."""
    import torch
    from safetensors.torch import save_file

    temp = spool / f".final_norm.{os.getpid()}.tmp"
    save_file(
        {"weight": weight.detach().cpu().contiguous(), "eps": torch.tensor([eps], dtype=torch.float64, device="cpu")},
        temp,
    )
    temp.replace(spool / "final_norm.safetensors")
