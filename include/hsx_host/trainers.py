"""What a training's command line is made of: places filled in from the hand-off, and the files that trainers ask for.

| place | |
|---|---|
| ``{python}`` | the trainer's Python |
| ``{bundle}`` | the shipped program: ``{bundle}/hsx_train/speculators_eagle3.py`` |
| ``{model}`` | folder of the target model |
| ``{data}`` | folder of the data set in the trainer's format |
| ``{checkpoints}`` | folder of the checkpoints: the same for a retry, so that a trainer can go on there |
| ``{drafter}`` | folder into which an export puts the drafter |
| ``{layers}`` | the layers as hsx, vLLM and speculators 0.5 count them, one word each |
| ``{layers_below}`` | the same, one lower each: as SpecForge and SGLang's llama models count them |
| ``{specforge_config}`` | a run config for ``specforge train``, written for this data set |
| ``{draft_config}`` | the drafter's ``config.json`` as SpecForge and SGLang read it |
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hsx_host import drafter, state
from hsx_host.contract import HandoffResult, TrainingSettings
from hsx_host.errors import BadInput

BUNDLE = Path(__file__).resolve().parents[1]
_PLACE = re.compile(r"\{([a-z_]+)\}")


@dataclass(frozen=True)
class Work:
    """The folders of one training; all below ``folder``, which belongs to one data set as it is now."""

    folder: Path

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def drafter(self) -> Path:
        return self.folder / "drafter"

    @property
    def specforge_config(self) -> Path:
        return self.folder / "specforge.json"

    @property
    def draft_config(self) -> Path:
        return self.folder / "draft_config.json"


def work_of(settings: TrainingSettings, handoff: HandoffResult) -> Work:
    """Named by data set, trainer, the manifests and the command: neither changed data nor another training goes on
    from an old checkpoint."""
    told = json.dumps([handoff.manifest_sha256, settings.command, settings.format])
    name = f"{handoff.dataset_id}-{settings.name}-{hashlib.sha256(told.encode()).hexdigest()[:12]}"
    return Work(Path(settings.root) / name)


def places(settings: TrainingSettings, handoff: HandoffResult, data: str) -> dict[str, list[str]]:
    """The words that stand for each place."""
    work = work_of(settings, handoff)
    return {
        "python": [settings.python],
        "bundle": [str(BUNDLE)],
        "model": [handoff.model["path"]],
        "data": [data],
        "checkpoints": [str(work.checkpoints)],
        "drafter": [str(work.drafter)],
        "layers": [str(k) for k in handoff.layers],
        "layers_below": [str(k - 1) for k in handoff.layers],
        "specforge_config": [str(work.specforge_config)],
        "draft_config": [str(work.draft_config)],
    }


def fill(command: Sequence[str], words: dict[str, list[str]], field: str) -> list[str]:
    """The command with its places filled in. A place of several words must be a word of its own.

    :raises BadInput: for a place that there is not; ``field`` names the setting.
    """
    filled: list[str] = []
    for word in command:
        for name in _PLACE.findall(word):
            if name not in words:
                known = ", ".join(f"{{{n}}}" for n in words)
                raise BadInput(f"there is no place {{{name}}}", field=field, value=word, fix=f"known: {known}")
        whole = _PLACE.fullmatch(word)
        if whole:
            filled += words[whole[1]]
        else:
            filled.append(_PLACE.sub(lambda m: " ".join(words[m[1]]), word))
    return filled


def write_files(settings: TrainingSettings, handoff: HandoffResult, data: str) -> Work:
    """Make the folders, and the files that the command names. Called again, they are as they were."""
    work = work_of(settings, handoff)
    work.checkpoints.mkdir(parents=True, exist_ok=True)
    text = " ".join(settings.command)
    if "{specforge_config}" in text or "{draft_config}" in text:
        config = drafter.sglang_config(Path(handoff.model["path"]), handoff, vocabulary=0)
        state.write_text(work.draft_config, json.dumps(config, indent=1) + "\n")
        state.write_text(work.specforge_config, json.dumps(specforge(work, handoff, data), indent=1) + "\n")
    return work


def specforge(work: Work, handoff: HandoffResult, data: str) -> dict[str, Any]:
    """A run of ``specforge train`` (0.2.0) on offline features; what a profile wants otherwise is an override in its
    command. It goes on from the newest checkpoint, where there is one."""
    newest = work.checkpoints / "hsx-latest"
    return {
        "run_id": "hsx",
        "output_dir": str(work.checkpoints),
        "model": {
            "target_model_path": handoff.model["path"],
            "draft_model_config": str(work.draft_config),
            "aux_hidden_state_layer_ids": [k - 1 for k in handoff.layers],
        },
        "data": {"hidden_states_path": data, "cache_dir": str(work.folder / "cache")},
        "training": {
            "strategy": "eagle3",
            "attention_backend": "sdpa",
            "save_interval": 500,
            "max_checkpoints": 2,
            **({"resume_from": str(newest.resolve())} if newest.exists() else {}),
        },
    }
