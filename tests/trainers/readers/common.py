"""What every reader hands back: loaded tensors by row, and what it says in words."""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file


def tell(out, rows, **said):
    """``rows``: by row, a dict of ids, mask, aux [n, 3H] and last [n, H]."""
    flat = {f"{row}.{name}": t.contiguous().clone() for row, one in rows.items() for name, t in one.items()}
    save_file(flat, str(Path(out) / "loaded.safetensors"))
    print(json.dumps(said))


def draft(Eagle3DraftModel, model_path, layers, vocab, **more):
    """A drafter of one llama block of the verifier's own shape, and a draft vocabulary from the files of ``vocab``."""
    import numpy as np
    from transformers import AutoConfig, LlamaConfig

    v = AutoConfig.from_pretrained(model_path)
    layer = LlamaConfig(
        vocab_size=v.vocab_size,
        hidden_size=v.hidden_size,
        intermediate_size=v.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=v.num_attention_heads,
        num_key_value_heads=v.num_key_value_heads,
        head_dim=v.head_dim,
        max_position_embeddings=v.max_position_embeddings,
        rms_norm_eps=v.rms_norm_eps,
        tie_word_embeddings=False,
    )
    (d2t,), (t2d,) = Path(vocab).glob("d2t-*.npy"), Path(vocab).glob("t2d-*.npy")
    d2t, t2d = torch.from_numpy(np.load(d2t)), torch.from_numpy(np.load(t2d))
    torch.manual_seed(0)
    return Eagle3DraftModel.from_training_args(
        verifier_config=layer,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=model_path,
        target_layer_ids=layers,
        draft_vocab_size=len(d2t),
        norm_before_residual=False,
        ttt_steps=2,
        draft_attn_impl="eager",
        **more,
    )


def step(model, batch, **kwargs):
    """Losses of two passes over a batch with one step of AdamW between, and whether every weight got a gradient."""
    model = model.float()
    batch = {k: v.float() if v.is_floating_point() else v for k, v in batch.items() if isinstance(v, torch.Tensor)}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(2):
        out = model(**batch, **kwargs)
        loss = out[1]
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    still = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    return {"losses": losses, "trained": len(trained), "without_gradient": still}


ARGS = sys.argv[1:]
