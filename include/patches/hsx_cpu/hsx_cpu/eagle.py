"""EAGLE-3 with chains of draft tokens on a CPU: what SGLang's speculative worker wants beside torch-native attention.

SGLang 0.5.23 has no seam for an out-of-tree platform at two places of it (the tree of draft tokens, its verification)
and no torch-native attention for drafts. For chains (``--speculative-eagle-topk 1``) all three are short: the tree of a
chain is a line, verifying it is a causal extend of the prompt, and a draft step is a decode one token longer than the
last. The scheduler, the worker, both models and the acceptance are SGLang's own. The few Triton kernels that are left
run in Triton's interpreter: start the server with ``TRITON_INTERPRET=1`` and ``TORCHDYNAMO_DISABLE=1``.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from sglang.srt.layers.attention import attention_registry
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.speculative import eagle_utils
from sglang.srt.speculative.draft_utils import DraftBackendFactory


class ChainAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Torch-native attention that also verifies chains: draft tokens stand behind the prefix, in order."""

    def forward_extend(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        batch = forward_batch
        if batch.forward_mode.is_target_verify():
            batch = copy.copy(batch)
            batch.extend_prefix_lens = forward_batch.seq_lens
            batch.extend_seq_lens = torch.full_like(forward_batch.seq_lens, forward_batch.spec_info.draft_token_num)
            batch.seq_lens = forward_batch.seq_lens + batch.extend_seq_lens
        return super().forward_extend(q, k, v, layer, batch, save_kv_cache)  # type: ignore[no-any-return]


class DraftStepAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Decode of one draft step: ``step`` draft tokens, and this one, are behind the accepted ones."""

    def __init__(self, model_runner: Any, step: int) -> None:
        super().__init__(model_runner)
        self._behind = step + 1

    def forward_decode(
        self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        batch = copy.copy(forward_batch)
        batch.seq_lens = forward_batch.seq_lens + self._behind
        return super().forward_decode(q, k, v, layer, batch, save_kv_cache)  # type: ignore[no-any-return]


class DraftAttention:
    """One attention a draft step, as the worker wants it."""

    def __init__(self, model_runner: Any, steps: int) -> None:
        self.attn_backends = [DraftStepAttention(model_runner, step) for step in range(steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Before the first step of a batch."""
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def build_chain(
    parent_list: Any,
    top_scores_index: Any,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    draft_token_num: int,
    *_: Any,
) -> None:
    """Fill in the tree of a chain; the outputs are given and written in place, the mask is not read here."""
    if topk != 1:
        raise NotImplementedError("on a CPU only chains: --speculative-eagle-topk 1")
    requests, steps = len(seq_lens), torch.arange(draft_token_num)
    positions.copy_((seq_lens.view(-1, 1) + steps).reshape(-1))
    retrieve_index.copy_(torch.arange(requests).view(-1, 1) * draft_token_num + steps)
    following = steps + 1
    following[-1] = -1
    retrieve_next_token.copy_(following.expand(requests, -1))
    retrieve_next_sibling.fill_(-1)


def verify_chain(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    target_predict: torch.Tensor,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Greedy: draft tokens count as long as each is what the target says behind the one before it.

    ``candidates`` and ``target_predict`` [requests, n]; the first candidate is the last accepted token. Written in
    place: ``predicts`` [requests * n], ``accept_index`` [requests, n], ``accept_token_num`` [requests].
    """
    right = (candidates[:, 1:] == target_predict[:, :-1]).long()
    counts = right.cumprod(dim=1).sum(dim=1)
    for row, count in enumerate(counts.tolist()):
        places = retrieve_index[row, : count + 1]
        accept_index[row, : count + 1] = places.to(accept_index.dtype)
        predicts[places] = target_predict[row, : count + 1].to(predicts.dtype)
    accept_token_num.copy_(counts)
    return predicts, accept_index, accept_token_num


def cache_locs(
    *, req_pool_indices: torch.Tensor, req_to_token: torch.Tensor, start_offset: torch.Tensor, end_offset: torch.Tensor,
    **_: Any,
) -> torch.Tensor:  # fmt: skip
    """Where each request's tokens from ``start_offset`` to ``end_offset`` lie in the KV cache, one after another."""
    spans = zip(req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist(), strict=True)
    return torch.cat([req_to_token[row, start:end] for row, start, end in spans]).to(torch.int64)


def install() -> None:
    """Put these in the places that SGLang looks them up in."""
    attention_registry.ATTENTION_BACKENDS["torch_native"] = ChainAttention
    DraftBackendFactory.create_decode_backend = lambda self: (
        DraftAttention(self.draft_model_runner, self.speculative_num_steps) if self.speculative_num_steps > 1 else None
    )
    DraftBackendFactory.create_draft_extend_backend = lambda self: ChainAttention(self.draft_model_runner)
    eagle_utils.build_tree_kernel_efficient_func = build_chain
    eagle_utils.verify_tree_greedy_func = verify_chain
