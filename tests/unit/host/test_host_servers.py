"""Launch commands, environments and what is refused: pure."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import make_spec

from hsx_host import contract as c
from hsx_host import servers
from hsx_host.errors import BadInput, Refused


@pytest.fixture
def extraction(tmp_path: Path) -> c.ServerSettings:
    return make_spec(tmp_path).extraction


def test_flags_mean_the_same_in_any_order_and_spelling() -> None:
    a = ["--model-path", "/m", "--tp", "8", "--port=30000", "--trust-remote-code", "--temp", "-1.5"]
    b = ["--trust-remote-code", "--temp", "-1.5", "--tensor-parallel-size", "8", "--model", "/m", "--host", "127.0.0.1"]
    assert servers.differences(a, b) == []
    assert servers.flags(["--x", "1", "2"])["--x"] == ("1", "2")
    told = servers.differences([*a, "--mem", "0.8"], [*b, "--radix"])
    assert told == [
        "--mem: runs with '0.8', the profile says nothing",
        "--radix: runs with nothing, the profile says it",
    ]
    assert "'8', the profile says '4'" in servers.differences(["--tp", "8"], ["--tp-size", "4"])[0]


def test_environment_is_clean(extraction: c.ServerSettings) -> None:
    caller = {
        "PATH": "/bin", "HOME": "/h", "PYTHONPATH": "/bundle", "HSX_JOB": "x", "CUDA_VISIBLE_DEVICES": "0",
        "SECRET_TOKEN": "s", "LD_LIBRARY_PATH": "/l",
    }  # fmt: skip
    base = servers.clean_base(caller)
    assert base == {"PATH": "/bin", "HOME": "/h", "CUDA_VISIBLE_DEVICES": "0", "LD_LIBRARY_PATH": "/l"}
    settings = replace(extraction, env={"PYTHONPATH": "/platform", "NCCL_ALGO": "Ring"})
    production = servers.environment(base | {"HSX_X": "1"}, settings)
    assert production == base | {"PYTHONPATH": "/platform", "NCCL_ALGO": "Ring"}
    captured = servers.environment(base, settings, plugin_dir="/plugin", capture_spec="/c.json")
    assert captured["PYTHONPATH"] == "/plugin:/platform"
    assert captured["HSX_CAPTURE_SPEC"] == "/c.json"
    bare = servers.environment({}, replace(settings, env={}), plugin_dir="/plugin", capture_spec="/c")
    assert bare["PYTHONPATH"] == "/plugin"


def test_launch_hash_covers_what_makes_a_launch(extraction: c.ServerSettings) -> None:
    first = servers.launch_hash("/p", extraction)
    assert servers.launch_hash("/p", replace(extraction, stop_grace_s=1.0)) == first
    others = [
        servers.launch_hash("/q", extraction),
        servers.launch_hash("/p", replace(extraction, args=[*extraction.args, "--x"])),
        servers.launch_hash("/p", replace(extraction, env={})),
        servers.launch_hash("/p", extraction, "plugin"),
    ]
    assert len({first, *others}) == 5


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (["--disable-radix-cache"], "--disable-radix-cache is missing"),
        (["--disable-cuda-graph"], "--disable-cuda-graph is missing"),
        ("--speculative-algorithm EAGLE3", "speculative"),
        ("--disaggregation-mode prefill", "disaggregation"),
        ("--pp 2", "pipeline"),
        ("--pipeline-parallel-size=2", "pipeline"),
        ("--nnodes 2", "one host"),
        ("--cuda-graph-backend-prefill breakable", "CUDA graphs on"),
        ("--config x.yaml", "can't be checked"),
    ],
)
def test_extraction_settings_that_lose_rows_are_refused(
    extraction: c.ServerSettings, change: str | list[str], word: str
) -> None:
    servers.check_extraction(extraction)
    args = extraction.args
    args = [a for a in args if a not in change] if isinstance(change, list) else [*args, *change.split()]
    with pytest.raises(Refused, match=word):
        servers.check_extraction(replace(extraction, args=args))


def test_harmless_values_pass(extraction: c.ServerSettings) -> None:
    for args in ("--pp-size 1", "--disaggregation-mode null", "--tp-size 8", "--cuda-graph-backend-decode disabled"):
        servers.check_extraction(replace(extraction, args=[*extraction.args, *args.split()]))


def test_addresses(extraction: c.ServerSettings) -> None:
    servers.check_address(extraction, "extraction")
    with pytest.raises(BadInput, match=r"extraction\.port"):
        servers.check_address(replace(extraction, port=1), "extraction")
    with pytest.raises(Refused, match="loopback"):
        servers.check_extraction(replace(extraction, host="0.0.0.0"))
    for host in ("localhost", "127.0.0.2", "::1"):
        servers.check_extraction(replace(extraction, host=host))
    assert servers.url(replace(extraction, host="0.0.0.0", port=7)) == "http://127.0.0.1:7"
    assert servers.url(replace(extraction, host="::1", port=7)) == "http://[::1]:7"


def test_scheduler_processes(extraction: c.ServerSettings) -> None:
    for args, count in (("", 1), ("--tp 8", 8), ("--tp 2 --dp 3", 6), ("--tp 8 --dp 8 --enable-dp-attention", 8)):
        assert servers.processes_of(replace(extraction, args=[*extraction.args, *args.split()])) == count
