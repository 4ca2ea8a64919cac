"""Rows of the demo's data set, the SSH server's configuration, and what the summary says."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hsx_demo import demo, summary
from hsx_demo.client import Task
from hsx_demo.dataset import _row, dataset_file
from hsx_demo.errors import DemoError
from hsx_demo.prompts import QUESTIONS
from hsx_demo.sshd import SshServer, sshd_config


def test_a_row_masks_the_prompt_and_ends_its_turn() -> None:
    assert _row([1, 5, 6], [7, 8], end_of_turn=2) == {"input_ids": [1, 5, 6, 7, 8, 2], "loss_mask": [0, 0, 0, 1, 1, 1]}
    assert _row([1], [7, 2], end_of_turn=2) == {"input_ids": [1, 7, 2], "loss_mask": [0, 1, 1]}


def test_at_least_32_different_questions_short_and_long() -> None:
    assert len({(q, pasted) for q, pasted, _ in QUESTIONS}) == len(QUESTIONS) >= 32
    words = [len(f"{q} {pasted}".split()) for q, pasted, _ in QUESTIONS]
    assert min(words) < 10
    assert max(words) > 300


def test_the_data_set_is_keyed_by_model_and_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    first = dataset_file(model, tmp_path)
    assert dataset_file(model, tmp_path) == first
    monkeypatch.setattr("hsx_demo.dataset.QUESTIONS", QUESTIONS[1:])
    assert dataset_file(model, tmp_path) != first
    monkeypatch.undo()
    (model / "config.json").write_text("{ }")
    assert dataset_file(model, tmp_path) != first


def test_the_ssh_server_takes_keys_only_and_listens_on_loopback(tmp_path: Path) -> None:
    lines = sshd_config(tmp_path, host="127.0.0.1", port=22022, env={"A": "b c"}).splitlines()
    assert {"ListenAddress 127.0.0.1", "PasswordAuthentication no", "Subsystem sftp internal-sftp"} <= set(lines)
    assert lines[-1] == 'SetEnv A="b c"'


def test_the_connection_verifies_the_host_key() -> None:
    server = SshServer("127.0.0.1", 2222, "me", "/k", "ssh-ed25519 AAAA", "/log", None)  # type: ignore[arg-type]
    body = json.loads(server.connection())
    assert (body["host"], body["port"], body["login"]) == ("127.0.0.1", 2222, "me")
    assert body["extra"]["host_key"] == "ssh-ed25519 AAAA"
    assert body["extra"]["no_host_key_check"] is False
    body = json.loads(server.connection(host_key="ssh-ed25519 BBBB", port=1))
    assert (body["extra"]["host_key"], body["port"]) == ("ssh-ed25519 BBBB", 1)


@pytest.mark.parametrize("text", ["{", "[1]", "3"])
def test_broken_params_are_refused_by_name(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_DEMO_CONF", text)
    with pytest.raises(DemoError, match="HSX_DEMO_CONF = "):
        demo.read_conf()


@pytest.mark.parametrize(
    ("variable", "value", "fix"),
    [
        ("HSX_HOST_PYTHON", "/no/python", "is no Python"),
        ("HSX_DEMO_DATASET", "/no/data.jsonl", "no such file"),
        ("HSX_DEMO_MODEL", "/no/model", "holds no config.json"),
    ],
)
def test_wrong_variables_are_refused_by_name_before_anything_starts(
    variable: str, value: str, fix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HSX_HOST_PYTHON", "/bin/sh")
    monkeypatch.setenv(variable, value)
    with pytest.raises(DemoError, match=f"{variable} = '{value}': .*{fix}"):
        demo.new_stack(demo.Stopwatch())


def test_stages_stand_in_the_order_of_their_start() -> None:
    tasks = [
        Task("verify", -1, "-1", "success", 1, "2026-01-01T00:00:30Z", "2026-01-01T00:00:32Z", 2.0),
        Task("extract", 1, "shard-00001", "failed", 1, "2026-01-01T00:00:10Z", "2026-01-01T00:00:20Z", 10.0),
        Task("handoff", -1, "-1", "", 0, "", "", 0.0),
        Task("plan", -1, "-1", "success", 1, "2026-01-01T00:00:00Z", "2026-01-01T00:00:05Z", 5.0),
    ]
    lines = [line.split() for line in summary.stage_lines(tasks)]
    assert [line[0] for line in lines] == ["plan", "extract", "verify", "handoff", "first"]
    assert lines[1][1:3] == ["[shard-00001]", "failed"]
    assert lines[-1][-2:] == ["32.0", "s"]


def test_the_rate_is_tokens_of_all_shards_by_their_seconds() -> None:
    shard = {"extracted": 2, "failed": 1, "tokens": 300, "bytes": 2048, "seconds": 1.5, "name": "s", "proof": "4 of 4"}
    [extracted, proof] = summary.data_lines(None, [shard, {**shard, "extracted": 1}], None, None)[:2]
    assert "3 samples in 2 shards, 600 tokens, 4.0 KiB in 3.0 s, 200 tok/s; 2 failed" in extracted
    assert proof.endswith("s: 4 of 4")


def test_a_run_that_left_nothing_still_has_a_summary() -> None:
    assert summary.data_lines(None, [], None, None) == []
    assert summary.production_lines(None, None, None) == []
    assert summary.handoff_lines(None) == []
