"""Trains an EAGLE-3 drafter with speculators' own code (0.7): its data set, model, trainer and checkpoints.

speculators' wheel has no command line for training (its repository's ``scripts/train.py`` does); this is one, with that
script's flag names, for speculators v1 files. It also runs where there is no accelerator, which that one does not.

  python speculators_eagle3.py --verifier-name-or-path MODEL --data-path DIR --save-path DIR --target-layer-ids 3 31 59

Called again with the same ``--save-path``, it goes on from the newest whole checkpoint. Progress goes to stderr as JSON
lines: ``{"progress": "train", "done": step, "total": steps, ...}``. The drafter has ``norm_before_residual`` off,
since SGLang's EAGLE-3 model adds the residual before its norm, and a norm for each layer before ``fc`` instead of one
over all three (``norm_before_fc``), which SGLang 0.5.14 does not have.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from speculators.models.eagle3 import Eagle3DraftModel
from speculators.models.eagle3.data import shift_batch
from speculators.train.data import CollateFn, SampleFileDataset, split_files
from speculators.train.distributed_batch_sampler import MultipackDistributedBatchSamplerV2
from speculators.train.trainer import Trainer, TrainerConfig
from speculators.train.vocab_mapping import build_vocab_mappings_from_distribution
from torch.utils.data import DataLoader
from transformers import AutoConfig, LlamaConfig

INTERVAL_S = 1.0
READERS = 4
ACCELERATED = torch.accelerator.is_available()  # not current_accelerator: a build with CUDA names it on any machine
#: Of the forward pass. Most CPUs multiply bfloat16 many times slower than float32; checkpoints are bfloat16 anyway.
DTYPE = torch.bfloat16 if ACCELERATED else torch.float32


def main(argv: list[str] | None = None) -> int:
    """Train to the end; 0 where the last epoch's checkpoint stands."""
    args = arguments().parse_args(argv)
    torch.manual_seed(args.seed)
    if args.threads:
        torch.set_num_threads(args.threads)
    save = Path(args.save_path)
    drop_halves(save)
    if (save / str(args.epochs - 1) / "training_state.json").exists():
        print(f"all {args.epochs} epochs are in {save}", file=sys.stderr, flush=True)
        return 0
    files = split_files(args.data_path, ratio=args.train_data_ratio, seed=args.seed)
    if not files[0] or not files[1]:
        raise SystemExit(
            f"--data-path {args.data_path}: {len(files[0])} and {len(files[1])} files to train and check on"
        )
    model = build_model(args)
    loaders = [loader(part, args, model.hidden_size) for part in files]
    kwargs = Eagle3DraftModel.get_trainer_kwargs(
        ttt_steps=args.ttt_steps, ttt_step_loss_decay=args.ttt_step_loss_decay, loss_fn=args.loss_fn
    )
    config = TrainerConfig(
        lr=args.lr,
        num_epochs=args.epochs,
        save_path=str(save),
        resume_from_checkpoint=True,
        train_call_kwargs=kwargs[0],
        val_call_kwargs=kwargs[1],
        scheduler_type="cosine",
        scheduler_warmup_ratio=args.warmup_ratio,
        hidden_states_dtype=DTYPE,
        log_freq=1,
        max_steps=args.max_steps or None,
    )
    Told(model, config, *loaders).run_training()
    return 0 if (save / str(args.epochs - 1) / "model.safetensors").exists() else 1


def arguments() -> argparse.ArgumentParser:
    """The flags; names are those of speculators' own script."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--verifier-name-or-path", required=True, help="folder of the target model")
    p.add_argument("--data-path", required=True, help="folder of speculators v1 files")
    p.add_argument("--save-path", required=True, help="folder of the checkpoints, one an epoch")
    p.add_argument("--target-layer-ids", type=int, nargs=3, required=True, help="the three layers of the data set")
    p.add_argument(
        "--draft-vocab-size", type=int, default=0, help="most frequent trained tokens; 0: the whole vocabulary"
    )
    p.add_argument("--total-seq-len", type=int, default=8192, help="tokens of a packed batch")
    p.add_argument("--epochs", type=int, default=10)
    p.add_argument("--max-steps", type=int, default=0, help="at most this many steps in all; 0: no limit")
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--warmup-ratio", type=float, default=0.02)
    p.add_argument("--ttt-steps", type=int, default=3)
    p.add_argument("--ttt-step-loss-decay", type=float, default=1.0)
    p.add_argument("--loss-fn", default="kl_div")
    p.add_argument("--train-data-ratio", type=float, default=0.9)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--threads", type=int, default=0, help="threads of torch on a CPU; 0 leaves it to torch")
    return p


def drop_halves(save: Path) -> None:
    """Remove checkpoints that a killed training left half written: their state file comes last."""
    for folder in save.glob("*") if save.is_dir() else []:
        if folder.is_dir() and folder.name.isdigit() and not (folder / "training_state.json").exists():
            print(f"removing the unfinished checkpoint {folder}", file=sys.stderr, flush=True)
            shutil.rmtree(folder)


def build_model(args: argparse.Namespace) -> Eagle3DraftModel:
    """A fresh drafter: one llama block of the verifier's own shape, with the verifier's embedding, head and norm."""
    verifier = AutoConfig.from_pretrained(args.verifier_name_or_path)
    verifier = getattr(verifier, "text_config", verifier)
    layer = LlamaConfig(
        vocab_size=verifier.vocab_size,
        hidden_size=verifier.hidden_size,
        intermediate_size=verifier.intermediate_size,
        num_hidden_layers=1,
        num_attention_heads=verifier.num_attention_heads,
        num_key_value_heads=verifier.num_key_value_heads,
        head_dim=getattr(verifier, "head_dim", None) or verifier.hidden_size // verifier.num_attention_heads,
        hidden_act="silu",
        max_position_embeddings=verifier.max_position_embeddings,
        rms_norm_eps=verifier.rms_norm_eps,
        rope_parameters=dict(verifier.rope_parameters),
        tie_word_embeddings=False,
    )
    d2t = t2d = None
    if args.draft_vocab_size:
        d2t, t2d = vocabulary(args, verifier.vocab_size)
    return Eagle3DraftModel.from_training_args(
        verifier_config=layer,
        t2d=t2d,
        d2t=d2t,
        verifier_name_or_path=args.verifier_name_or_path,
        target_layer_ids=args.target_layer_ids,
        draft_vocab_size=args.draft_vocab_size or verifier.vocab_size,
        norm_before_residual=False,
        fc_norm=True,
        norm_output=True,
        ttt_steps=args.ttt_steps,
        draft_attn_impl="simple_flex_attention" if ACCELERATED else "eager",
    )


def vocabulary(args: argparse.Namespace, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """d2t and t2d of the most frequent trained tokens; kept beside the checkpoints, so that a resume has the same."""
    kept = [Path(args.save_path) / f"{name}-{args.draft_vocab_size}.npy" for name in ("d2t", "t2d")]
    if not all(path.exists() for path in kept):
        counts: dict[int, int] = {}
        for path in sorted(Path(args.data_path).glob("*.pt")):
            sample = torch.load(path, mmap=True, weights_only=True)
            ids, times = sample["input_ids"][sample["loss_mask"].bool()].unique(return_counts=True)
            for i, n in zip(ids.tolist(), times.tolist(), strict=True):
                counts[i] = counts.get(i, 0) + n
        maps = build_vocab_mappings_from_distribution(counts, args.draft_vocab_size, size)
        kept[0].parent.mkdir(parents=True, exist_ok=True)
        for path, values in zip(kept, maps, strict=True):
            np.save(path, values.numpy())
    d2t, t2d = (torch.from_numpy(np.load(path)) for path in kept)
    return d2t, t2d


def loader(files: list[Path], args: argparse.Namespace, hidden: int) -> DataLoader[Any]:
    """speculators' data set, sampler and collate function over these files."""
    data = SampleFileDataset(args.total_seq_len, file_list=files, hidden_states_dtype=DTYPE)
    sampler = MultipackDistributedBatchSamplerV2(
        batch_max_length=args.total_seq_len, lengths=data.approx_lengths, num_replicas=1, rank=0
    )
    collate = CollateFn(args.total_seq_len, hidden, 3, DTYPE, preprocess=shift_batch)
    workers = READERS if ACCELERATED else 0  # on a CPU they would take it from the training
    return DataLoader(data, batch_sampler=sampler, collate_fn=collate, num_workers=workers)


class Told(Trainer):  # type: ignore[misc]
    """speculators' trainer, telling its progress; without an accelerator it runs on the CPU."""

    def setup_trainer(self) -> None:
        """Called first by the constructor: the device must stand before the model is put on it."""
        if not ACCELERATED:
            self.local_rank, self.device_type = torch.device("cpu"), "cpu"  # type: ignore[assignment]
            torch.accelerator.synchronize = lambda *a, **k: None  # type: ignore[assignment]
            import speculators.train.checkpointer as checkpointer

            checkpointer.get_current_device = lambda: "cpu"
        super().setup_trainer()
        self._said = 0.0

    def train_epoch(self, epoch: int) -> None:
        """One epoch; each step of the optimizer is told, at most once a second."""
        optimizer, total = self.optimizers[0], self.config.num_epochs * len(self.train_loader)
        total = min(total, self.config.max_steps or total)
        began, first = time.monotonic(), self.global_step

        def told(*_: Any) -> None:
            done, now = self.global_step + 1, time.monotonic()
            if now - self._said >= INTERVAL_S or done >= total:
                self._said = now
                rate = (done - first) / max(now - began, 1e-9)
                line = {"progress": "train", "done": done, "total": total, "rate": round(rate, 3),
                        "eta": round((total - done) / rate, 1)}  # fmt: skip
                print(json.dumps(line), file=sys.stderr, flush=True)

        handle = optimizer.register_step_post_hook(told)
        try:
            super().train_epoch(epoch)
        finally:
            handle.remove()

    def val_epoch(self, epoch: int) -> dict[str, float] | None:
        """The check on held-back samples, told in words."""
        found: dict[str, float] | None = super().val_epoch(epoch)
        if found:
            kept = {k.removesuffix("_epoch"): round(v, 4) for k, v in found.items() if "loss" in k or "acc" in k}
            print(f"epoch {epoch}: {json.dumps(kept)}", file=sys.stderr, flush=True)
        return found


if __name__ == "__main__":
    raise SystemExit(main())
