"""Launch settings that can change the rows are part of a data set's identity; those that can't are not."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import host_data as h
import pytest

from hsx_host import contract as c
from hsx_host import fingerprint, numerics, plan, serve, verify
from hsx_host.errors import Refused, TryAgain

CHANGES = [
    "--quantization fp8",
    "--kv-cache-dtype=fp8_e4m3",
    "--dtype float16",
    '--json-model-override-args {"rope_theta":1}',
    "--lora-paths x=/y --enable-lora",
    "--attention-backend dual_chunk_flash_attn",
    "--torchao-config int8wo",
    "--revision r9",
    "--a-flag-of-tomorrow 1",
    "--quant fp8",  # argparse takes abbreviations
    "SGLANG_ENABLE_X=1",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1",
    "PYTHONPATH=/fork",
    "A_VARIABLE_OF_TOMORROW=1",
]
HARMLESS = [
    "--port 9 --host 127.0.0.1",
    "--log-level debug --enable-metrics --decode-log-interval 9",
    "--mem-fraction-static 0.7 --max-total-tokens 9 --max-running-requests 9 --cpu-offload-gb 1",
    "--chunked-prefill-size 64 --max-prefill-tokens 9 --disable-overlap-schedule --schedule-policy lpm",
    "--disable-radix-cache --disable-cuda-graph --cuda-graph-max-bs 8",
    "--tp 2 --dp-size 2 --enable-dp-attention --ep-size 2",
    "--api-key secret --served-model-name x --random-seed 3 --sleep-on-idle",
    "NCCL_ALGO=Ring",
    "OMP_NUM_THREADS=4",
    "HF_TOKEN=secret",
    "CUDA_VISIBLE_DEVICES=3",
    "SGLANG_LOG_LEVEL=debug",
    "HSX_CAPTURE_SPEC=/x",
]


def under(spec: c.RunSpec, words: str) -> c.RunSpec:
    """The spec with more flags, or one more variable, for the extraction server."""
    server = spec.extraction
    if words.startswith("--"):
        return replace(spec, extraction=replace(server, args=[*server.args, *words.split()]))
    return replace(spec, extraction=replace(server, env=server.env | dict([words.split("=")])))


@pytest.fixture
def spec(tmp_path: Path) -> c.RunSpec:
    made = h.make_spec(tmp_path, h.write_lines(tmp_path / "d.jsonl", h.samples(8)))
    plan.run(made, Namespace(dry_run=False, failed=False))
    return made


@pytest.mark.parametrize("words", CHANGES)
def test_what_can_change_rows_makes_another_data_set_and_is_named_in_a_refusal(spec: c.RunSpec, words: str) -> None:
    dataset, meaning = fingerprint.opened(spec)
    other = under(spec, words)
    with pytest.raises(TryAgain, match="not been planned"):
        fingerprint.opened(other)
    dataset.rename(dataset.with_name(fingerprint.semantics(other).dataset_id))
    name = min(numerics.of(other.extraction).keys() - meaning.numerics.keys())
    for call in (fingerprint.opened, lambda s: plan.run(s, Namespace(dry_run=False, failed=False))):
        with pytest.raises(Refused, match=f"was made with {name} not given") as e:
            call(other)
        assert e.value.doc.field.endswith(name)


@pytest.mark.parametrize("words", HARMLESS)
def test_what_only_serves_batches_or_logs_is_the_same_data_set(spec: c.RunSpec, words: str) -> None:
    assert fingerprint.opened(under(spec, words)) == fingerprint.opened(spec)


def test_order_and_spelling_of_flags_make_no_other_data_set(spec: c.RunSpec) -> None:
    one, two = under(spec, "--dtype half --kv-cache-dtype auto"), under(spec, "--kv-cache-dtype=auto --dtype=half")
    assert fingerprint.semantics(one) == fingerprint.semantics(two)


def test_the_model_of_the_flags_is_the_profiles(spec: c.RunSpec) -> None:
    fingerprint.opened(under(spec, f"--model {spec.model.path}"))
    other = under(spec, "--disable-radix-cache --disable-cuda-graph --model-path /another/model")
    for call in (
        fingerprint.opened,
        lambda s: serve.check_settings(s, "extraction"),
        lambda s: verify.run(s, Namespace(deep=False, shard=None, window_ended=False)),
    ):
        with h.refuses(Refused, "extraction.args", "--model-path /another/model", "model.path"):
            call(other)


def test_a_data_set_holds_no_secret(spec: c.RunSpec) -> None:
    given = under(under(spec, "--some-api-key s3cret --hf-token s3cret"), "DB_PASSWORD=s3cret")
    assert "s3cret" not in str(fingerprint.semantics(given))


def test_an_engine_variable_of_the_env_file_makes_another_data_set_and_its_value_stays_there(
    spec: c.RunSpec, tmp_path: Path
) -> None:
    file = tmp_path / "variables"
    file.touch(mode=0o600)
    given = replace(spec, extraction=replace(spec.extraction, env_file=str(file)))
    ids = []
    for text in ("DB_DSN=s3cret\nNCCL_ALGO=Ring\n", "DB_DSN=rotated\n", "SGLANG_X=s3cret\n", "SGLANG_X=1\n"):
        file.write_text(text)
        meaning = fingerprint.semantics(given)
        ids.append(meaning.dataset_id)
        assert "s3cret" not in str(meaning)
    assert ids[0] == ids[1] == fingerprint.semantics(spec).dataset_id
    assert len({ids[0], *ids[2:]}) == 3


def test_a_variable_of_the_env_file_counts_before_the_profiles_own(spec: c.RunSpec, tmp_path: Path) -> None:
    file = tmp_path / "variables"
    file.touch(mode=0o600)
    file.write_text("SGLANG_X=2\n")
    own = under(spec, "SGLANG_X=1")
    both = replace(own, extraction=replace(own.extraction, env_file=str(file)))
    alone = replace(spec, extraction=replace(spec.extraction, env_file=str(file)))
    assert numerics.of(both.extraction) == numerics.of(alone.extraction) != numerics.of(own.extraction)
