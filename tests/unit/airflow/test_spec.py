"""From profile and Params to the frozen spec."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hsx_host import contract as c
from hsx_operators.errors import ConfigError, ProfileError
from hsx_operators.profile import Profile, load_profile
from hsx_operators.spec import build_spec, main, parse_shards


@pytest.fixture
def profile() -> Profile:
    return load_profile("kimi-k2.5")


def build(profile: Profile, **params: Any) -> c.RunSpec:
    return build_spec(profile, "kimi-k2.5", params, "run-1")


def changed(profile: Profile, room: str, **values: Any) -> Profile:
    body = profile.model_dump()
    body[room].update(values)
    return Profile.model_validate(body)


def test_production_and_extraction_arguments(profile: Profile) -> None:
    profile = changed(profile, "production", host="0.0.0.0", args=["--tp-size 8", "--served-model-name 'a b'"])
    spec = build(profile)
    assert spec.production.args == [
        "--model-path", "/data/models/Kimi-K2.5", "--tp-size", "8", "--served-model-name", "a b",
        "--host", "0.0.0.0", "--port", "30000",
    ]  # fmt: skip
    assert spec.extraction.args == [
        "--model-path", "/data/models/Kimi-K2.5", "--tp-size", "8", "--served-model-name", "a b",
        "--disable-radix-cache", "--disable-cuda-graph", "--chunked-prefill-size", "8192",
        "--host", "127.0.0.1", "--port", "30000",
    ]  # fmt: skip
    # a server that takes prompts with capture on must not be reachable from outside
    assert (spec.production.host, spec.extraction.host) == ("0.0.0.0", "127.0.0.1")


def test_flags_add_replace_and_remove(profile: Profile) -> None:
    profile = changed(
        profile, "production", args=["--tp 8", "--enable-mixed-chunk", "--chunked-prefill-size=4096", "--dtype auto"]
    )
    flags = {"disable-radix-cache": True, "tp-size": 4, "enable-mixed-chunk": None, "chunked-prefill-size": 128}
    args = build(changed(profile, "extraction", flags=flags)).extraction.args
    assert args[2:-4] == ["--tp-size", "4", "--chunked-prefill-size", "128", "--dtype", "auto", "--disable-radix-cache"]


def test_environment_of_extraction(profile: Profile) -> None:
    spec = build(changed(profile, "extraction", env={"NCCL_ALGO": None, "EXTRA": "1"}))
    assert spec.production.env == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
    assert spec.extraction.env == {"NCCL_PROTO": "LL", "EXTRA": "1"}


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--speculative-algorithm EAGLE3"], "speculative-algorithm"),
        (["--disaggregation-mode prefill"], "disaggregation-mode"),
        (["--pp 2"], "pp-size"),
        (["--pipeline-parallel-size=2"], "pp-size"),
    ],
)
def test_what_the_design_forbids_is_refused_and_can_be_removed(profile: Profile, args: list[str], named: str) -> None:
    with_it = changed(profile, "production", args=args)
    with pytest.raises(ProfileError, match=f"--{named}.*add `{named}: null` to extraction.flags"):
        build(with_it)
    flags = {**profile.extraction.flags, named: None}
    spec = build(changed(with_it, "extraction", flags=flags))
    assert not any(named in a for a in spec.extraction.args)
    assert spec.production.args[2:-4] == args[0].split()  # production is as it was


def test_a_radix_cache_is_refused(profile: Profile) -> None:
    with pytest.raises(ProfileError, match="disable-radix-cache"):
        build(changed(profile, "extraction", flags={}))


@pytest.mark.parametrize("args", [["--port 1"], ["--model-path /x"], ["--host=0.0.0.0"], ["positional"], ["--x 'y"]])
def test_bad_production_arguments_are_named(profile: Profile, args: list[str]) -> None:
    with pytest.raises(ProfileError, match=r"production.args"):
        build(changed(profile, "production", args=args))


@pytest.mark.parametrize("flags", [{"port": 1}, {"model-path": "/x"}, {"disable-radix-cache": False}])
def test_bad_flags_are_named(profile: Profile, flags: dict[str, Any]) -> None:
    with pytest.raises(ProfileError, match=r"extraction.flags"):
        build(changed(profile, "extraction", flags=flags))


def test_params_override(profile: Profile) -> None:
    spec = build(
        profile,
        dataset="/data/my chats.jsonl.gz",
        shards="3, 7-9",
        output_root="/out",
        formats=["speculators_v1"],
        cleanup_policy="auto",
        benchmark="off",
        dry_run=True,
    )
    assert (spec.data.path, spec.data.name) == ("/data/my chats.jsonl.gz", "my-chats")
    assert spec.data.shards == [3, 7, 8, 9]
    assert spec.host.output_root == "/out"
    assert spec.cleanup.policy == "auto"
    assert not spec.benchmark.enabled


def test_defaults_are_the_profiles(profile: Profile) -> None:
    empty = build(
        profile, dataset="", shards="", output_root="", formats=[], cleanup_policy="as in the profile", benchmark=""
    )
    assert empty == build(profile)
    assert (empty.data.name, empty.data.shards) == ("kimi_k2.5_10000", [])
    assert empty.cleanup.policy == "ask"
    assert c.decode(c.RunSpec, c.encode(empty)) == empty


@pytest.mark.parametrize(
    ("params", "named"),
    [
        ({"shards": "3-"}, "shards"),
        ({"shards": "9-7"}, "shards"),
        ({"shards": "all"}, "shards"),
        ({"shards": ","}, "shards"),  # names nothing, and is no wish for all
        ({"shards": " , "}, "shards"),
        ({"shards": "\u0663"}, "shards"),  # an Arabic 3
        ({"shards": "failed, 3"}, "shards"),
        ({"shards": [3]}, "shards"),
        ({"dataset": "relative.jsonl"}, "dataset"),
        ({"dataset": "/a\nb"}, "dataset"),
        ({"output_root": "out"}, "output_root"),
        ({"formats": ["npz"]}, "formats"),
        ({"cleanup_policy": "always"}, "cleanup_policy"),
        ({"benchmark": "maybe"}, "benchmark"),
        ({"shard": "3"}, "shard"),
    ],
)
def test_bad_params_are_refused_by_name(profile: Profile, params: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError) as e:
        build(profile, **params)
    assert e.value.field == named
    assert e.value.fix


def test_benchmark_without_loads(profile: Profile) -> None:
    with pytest.raises(ConfigError, match="no loads"):
        build(changed(profile, "benchmark", loads={}), benchmark="on")


@pytest.mark.parametrize(
    ("text", "shards"), [("", []), (" ", []), ("3,", [3]), ("failed", []), ("0", [0]), ("2-4,3, 9", [2, 3, 4, 9])]
)
def test_shards(text: str, shards: list[int]) -> None:
    assert parse_shards(text) == shards


def test_from_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--profile", "kimi-k2.5", "--run-id", "r", "--set", "shards=1-2", "--set", "benchmark=off"]) == 0
    spec = c.decode(c.RunSpec, capsys.readouterr().out)
    assert (spec.run_id, spec.data.shards, spec.benchmark.enabled) == ("r", [1, 2], False)
    json.loads(c.encode(spec))


@pytest.mark.parametrize("argv", [["--profile", "x"], ["--profile", "kimi-k2.5", "--set", "shards=x"]])
def test_from_a_shell_errors_go_to_stderr(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(argv) == 2
    out = capsys.readouterr()
    assert out.out == ""
    assert "known" in out.err or "shards" in out.err
