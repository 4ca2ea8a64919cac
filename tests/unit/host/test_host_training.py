"""The hand-off check, the training command, the drafter that SGLang gets, and the acceptance figures."""

from __future__ import annotations

import io
import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import host_data as h
import pytest

from hsx_host import acceptance, drafter, formats, handoff, plan, train, trainers, training_check, verify
from hsx_host import contract as c
from hsx_host.errors import BadInput, Refused, TryAgain

# A trainer in six lines: counts its calls, saves a checkpoint an epoch, dies where it is told to.
TRAINER = """
import json, os, pathlib, sys
save, die = pathlib.Path(sys.argv[1]), len(sys.argv) > 3 and sys.argv[3] == "die"
for epoch in range(3):
    if (save / str(epoch)).exists(): continue
    print(f"Epoch {epoch}: {epoch + 1}/3 [00:01]", flush=True)
    (save / str(epoch)).mkdir(parents=True)
    (save / str(epoch) / "model.safetensors").write_text("weights")
    if die and epoch == 1: sys.exit("no memory")
"""


@pytest.fixture
def made(tmp_path: Path) -> c.RunSpec:
    """A handed-off data set, and a training of it."""
    h.make_model(tmp_path / "model", num_attention_heads=4, num_key_value_heads=2, intermediate_size=128)
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(6)))
    plan.run(spec, Namespace(dry_run=False, failed=False))
    h.publish(spec)
    handoff.run(spec, Namespace(window_ended=False))
    return with_training(spec, "{layers}")


def with_training(spec: c.RunSpec, *more: str, **changes: Any) -> c.RunSpec:
    script = Path(spec.host.home) / "trainer.py"
    script.write_text(TRAINER)
    settings = c.TrainingSettings(
        name="own", command=["{python}", str(script), "{checkpoints}", *more], format="speculators_v1",
        root=f"{spec.host.home}/drafters", python=sys.executable,
    )  # fmt: skip
    return replace(spec, training=replace(settings, **changes))


def check(spec: c.RunSpec, **args: Any) -> c.HandoffCheck:
    return training_check.run(spec, Namespace(**{"handoff": "", "manifest": "", **args}))


def run(spec: c.RunSpec) -> c.TrainingResult:
    return train.run(spec, Namespace(handoff="", manifest="", grace=5.0))


def test_a_handoff_is_checked_and_the_command_filled_in(made: c.RunSpec) -> None:
    found = check(made)
    assert (found.samples, found.data.rsplit("/", 1)[1]) == (6, "v1")
    assert found.command[2:] == [f"{found.work}/checkpoints", "1", "3", "6"]
    assert check(made, manifest=found.manifest_sha256, handoff=found.handoff) == found


def test_a_handoff_that_is_no_longer_true_is_refused(made: c.RunSpec) -> None:
    with h.refuses(Refused, "handoff", "expected 00"):
        check(made, manifest="00")
    (manifest,) = Path(check(made).handoff).parent.glob("shards/00001/manifest.jsonl")
    manifest.write_text(manifest.read_text().splitlines(keepends=True)[0])
    with h.refuses(Refused, "handoff", "not the one that was handed off"):
        check(made)


def test_damage_that_verify_found_ends_a_handoff(made: c.RunSpec) -> None:
    dataset = Path(check(made).handoff).parent
    assert handoff.is_current(dataset)
    path = dataset / "v1/data_2.pt"
    body = bytearray(path.read_bytes())
    at = formats.get("speculators_v1").check(path, 7, h.SHAPE)[1]["layer_3"][0]
    path.write_bytes(body[: at + 5] + bytes([body[at + 5] ^ 1]) + body[at + 6 :])
    with h.refuses(Refused, "manifest.jsonl", "layer_3 does not match"):
        verify.run(made, Namespace(deep=True, shard=None, window_ended=False))
    assert not handoff.is_current(dataset)
    with h.refuses(Refused, "handoff", "verify found damaged"):
        check(made)


def test_what_the_trainer_needs_and_is_not_there_is_named(made: c.RunSpec, tmp_path: Path) -> None:
    assert made.training is not None
    with h.refuses(Refused, "training.trainer", "own reads specforge; the data set holds speculators_v1"):
        check(replace(made, training=replace(made.training, format="specforge")))
    with h.refuses(BadInput, "training.command", "no place {nothing}"):
        check(replace(made, training=replace(made.training, command=["{nothing}"])))
    with h.refuses(BadInput, "training", "no training"):
        check(replace(made, training=None))
    with h.refuses(BadInput, "handoff", "can't be read"):
        check(made, handoff=str(tmp_path / "none.json"))


def test_training_tells_progress_and_names_the_drafter(made: c.RunSpec, capfd: pytest.CaptureFixture[str]) -> None:
    result = run(made)
    assert result.drafter == f"{result.work}/checkpoints/2"
    assert not result.resumed
    assert '{"progress": "train", "done": 3, "total": 3' in capfd.readouterr().err


def test_a_training_that_dies_goes_on_from_its_checkpoint(made: c.RunSpec) -> None:
    dies = with_training(made, "x", "die")
    with pytest.raises(TryAgain, match="no memory"):
        run(dies)
    (Path(dies.host.home) / "trainer.py").write_text(TRAINER.replace("die and", "False and"))
    result = run(dies)
    assert result.resumed
    assert result.drafter.endswith("/checkpoints/2")


def test_changed_data_and_another_command_train_in_folders_of_their_own(made: c.RunSpec) -> None:
    settings, one = training_check.settings_of(made), training_check.read(made, "")
    other = replace(one, manifest_sha256="f" * 64)
    longer = replace(settings, command=[*settings.command, "--epochs", "9"])
    folders = {trainers.work_of(*pair).folder for pair in ((settings, one), (settings, other), (longer, one))}
    assert len(folders) == 3


def test_several_commands_and_one_that_does_not_exist(made: c.RunSpec) -> None:
    assert list(train.commands(["a", "b", "&&", "c"])) == [["a", "b"], ["c"]]
    assert made.training is not None
    with h.refuses(BadInput, "training.command", "can't be run"):
        run(replace(made, training=replace(made.training, command=["/nowhere/python"])))
    with pytest.raises(TryAgain, match="left no checkpoint"):
        run(replace(made, training=replace(made.training, command=["true"])))


def test_progress_of_bars_and_of_our_own_lines(capfd: pytest.CaptureFixture[str]) -> None:
    own = '{"progress": "train", "done": 1, "total": 9, "rate": 1.0, "eta": 8.0}'
    tail = train.tell(io.StringIO(f"hello\rEpoch 0:  12%|#  | 3/24 [00:01<00:07]\n{own}\nlast\n"))
    said = capfd.readouterr().err
    assert '"done": 3, "total": 24' in said
    assert own in said
    assert tail == ["hello", "last"]


def test_specforge_gets_its_config_and_the_newest_checkpoint(made: c.RunSpec) -> None:
    settings = replace(training_check.settings_of(made), command=["{specforge_config}"])
    given = training_check.read(made, "")
    work = trainers.write_files(settings, given, "/data/specforge")
    config = json.loads(work.specforge_config.read_text())
    assert config["model"]["aux_hidden_state_layer_ids"] == [0, 2, 5], "SpecForge counts one lower"
    assert "resume_from" not in config["training"]
    (work.checkpoints / "hsx-step5").mkdir()
    (work.checkpoints / "hsx-latest").symlink_to("hsx-step5")
    trainers.write_files(settings, given, "/data/specforge")
    config = json.loads(work.specforge_config.read_text())
    assert config["training"]["resume_from"] == str(work.checkpoints / "hsx-step5")


# ------------------------------------------------------------------------------ the drafter


def checkpoint(folder: Path, **changes: Any) -> Path:
    """speculators' config.json and a weights file."""
    folder.mkdir(parents=True, exist_ok=True)
    body = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", "draft_vocab_size": 100,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 6], "norm_before_residual": False, "norm_before_fc": True,
        "transformer_layer_config": {"hidden_size": h.HIDDEN, "intermediate_size": 77, "num_attention_heads": 4,
                                     "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5}, **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(body))
    (folder / "model.safetensors").write_text("weights")
    return folder


@pytest.fixture
def given(made: c.RunSpec) -> c.HandoffResult:
    return training_check.read(made, "")


def test_a_drafter_of_speculators_becomes_one_that_sglang_serves(given: c.HandoffResult, tmp_path: Path) -> None:
    out = drafter.make_servable(checkpoint(tmp_path / "ck/0"), tmp_path / "served", given)
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert (config["intermediate_size"], config["draft_vocab_size"], config["vocab_size"]) == (77, 100, h.VOCAB)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 2, 5], "SGLang's llama models add one"
    assert config["eagle_config"]["norm_before_fc"]
    assert (out / "model.safetensors").read_text() == "weights"
    assert drafter.make_servable(tmp_path / "ck/0", tmp_path / "served", given) == out, "again is no error"
    assert drafter.make_servable(out, tmp_path / "again", given) == out, "what is right is served as it is"


def test_sglangs_own_checkpoint_gets_the_data_sets_layers(given: c.HandoffResult, tmp_path: Path) -> None:
    own = checkpoint(tmp_path / "0", architectures=["LlamaForCausalLMEagle3"], eagle_config={"x": 1})
    out = drafter.make_servable(own, tmp_path / "served", given)
    found = json.loads((out / "config.json").read_text())["eagle_config"]
    assert found == {"x": 1, "eagle_aux_hidden_state_layer_ids": [0, 2, 5], "use_aux_hidden_state": True}


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"norm_before_residual": True}, "norm_before_residual"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 7]}, "was trained on the layers"),
        ({"speculators_model_type": "dflash"}, "neither"),
    ],
)
def test_a_drafter_that_would_be_served_wrongly_is_refused(
    given: c.HandoffResult, tmp_path: Path, changes: dict[str, Any], word: str
) -> None:
    with h.refuses(BadInput, "drafter", word):
        drafter.make_servable(checkpoint(tmp_path / "0", **changes), tmp_path / "served", given)


def test_a_drafter_with_a_norm_that_this_sglang_lacks_is_refused(
    given: c.HandoffResult, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = tmp_path / "site/sglang/srt/models"
    models.mkdir(parents=True)
    (tmp_path / "site/sglang/__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "sglang", raising=False)  # another test may have imported the real one
    (models / "llama_eagle3.py").write_text("norm_before_fc = 1")
    drafter.make_servable(checkpoint(tmp_path / "0"), tmp_path / "served", given)
    (models / "llama_eagle3.py").write_text("fc_norm = 1")
    with h.refuses(BadInput, "drafter", "norm_before_fc"):
        drafter.make_servable(checkpoint(tmp_path / "0"), tmp_path / "served", given)
    drafter.make_servable(checkpoint(tmp_path / "1", norm_before_fc=False, fc_norm=True), tmp_path / "served", given)


def test_layer_ids_of_a_setter_that_takes_them_as_they_are() -> None:
    assert drafter.sglang_layer_ids("DeepseekV3ForCausalLM", [3, 31, 59]) == [3, 31, 59]
    assert drafter.sglang_layer_ids("LlamaForCausalLM", [3, 31, 59]) == [2, 30, 58]
    with pytest.raises(BadInput):
        drafter.sglang_layer_ids("DeepseekV3ForCausalLM", [1, 31, 59])


def test_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    assert drafter.newest_checkpoint(tmp_path) is None
    for name in ("2", "10", "interrupted"):
        checkpoint(tmp_path / name)
    (tmp_path / "11").mkdir()
    assert drafter.newest_checkpoint(tmp_path) == tmp_path / "10"
    (tmp_path / "checkpoint_best").symlink_to("2")
    assert drafter.newest_checkpoint(tmp_path) == tmp_path / "2"


# ------------------------------------------------------------------------------ acceptance


def settings_of(**changes: Any) -> c.AcceptanceSettings:
    server = c.ServerSettings(["--port", "1"], {"A": "1"}, "127.0.0.1", 1)
    return c.AcceptanceSettings(server=server, **changes)


def test_the_server_with_the_drafter() -> None:
    changed = acceptance.with_drafter(settings_of(steps=4, draft_flags=["--x"], draft_env={"B": "2"}), Path("/d"))
    assert changed.server.args == [
        "--port", "1", "--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d",
        "--speculative-num-steps", "4", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "5", "--x",
    ]  # fmt: skip
    assert changed.server.env == {"A": "1", "B": "2"}


def test_figures_count_what_each_step_of_the_target_gave() -> None:
    prompts = [acceptance.Prompt(0, [1]), acceptance.Prompt(1, [2])]
    alone = [acceptance.Answer(list(range(9)), 8, 4.0), acceptance.Answer(list(range(9)), 8, 8.0)]
    drafted = [acceptance.Answer(list(range(9)), 4, 1.0), acceptance.Answer([7] * 9, 2, 2.0)]
    found = acceptance.compare(settings_of(prompts="/p", minimum=3.0), "/d", prompts, alone, drafted)
    assert found.alone.acceptance_length == 1.0
    assert found.drafted.acceptance_length == round(16 / 6, 4), "the first token of each answer is the prefill's"
    assert (found.alone.output_tok_s, found.drafted.output_tok_s, found.speedup) == (2.25, 9.0, 4.0)
    assert (found.drafted.same_output, found.held_out, found.ok) == (1, True, False)
    assert "held-out" in found.text


def test_prompts_of_the_data_set_end_before_the_first_trained_token(tmp_path: Path) -> None:
    lines = [h.line([5, 6, 7, 8], [0, 0, 1, 1]), h.line([9, 9, 9, 9], [0, 0, 0, 0]), h.line([1, 2], [1, 1])]
    spec = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", lines))
    dataset = Path(plan.run(spec, Namespace(dry_run=False, failed=False)).dataset_dir)
    assert [p.ids for p in acceptance.of_dataset(dataset, 9)] == [[5, 6], [9, 9]]
