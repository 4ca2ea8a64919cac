"""Profiles: variables, and one error that names everything that is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from hsx_operators import INCLUDE
from hsx_operators.errors import ProfileError
from hsx_operators.profile import load_profile, parse_profile
from hsx_operators.profile_files import default_profile, list_profiles


def body() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((INCLUDE / "profiles" / "kimi-k2.5.yaml").read_text())
    return loaded


def problems(profile: dict[str, Any]) -> list[str]:
    with pytest.raises(ProfileError) as e:
        parse_profile(profile, "profile test")
    return e.value.problems


def test_shipped_reference_profile_loads() -> None:
    profile = load_profile("kimi-k2.5")
    assert profile.capture.layers == [3, 31, 59]
    assert profile.production.env == {"NCCL_PROTO": "LL", "NCCL_ALGO": "Ring"}
    assert profile.tasks.shard_retries == 2


def test_undefined_variables_are_named_with_field_and_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTHON", "HOME", "OUTPUT", "MODEL", "PORT", "PLATFORM", "DATASET"):
        monkeypatch.delenv(f"HSX_DEMO_{name}", raising=False)
    with pytest.raises(ProfileError) as e:
        load_profile("demo")
    text = str(e.value)
    assert "production.port = '${HSX_DEMO_PORT}': the environment variable HSX_DEMO_PORT is not set" in text
    assert "export HSX_DEMO_PORT=" in text
    # the field is told once: that "${HSX_DEMO_PORT}" is no number is no second problem
    assert text.count("production.port") == 1
    assert "data.path" in text
    assert "host.old_state_roots[0]" in text


def test_variables_and_defaults_are_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HSX_T_PORT", "31000")
    monkeypatch.delenv("HSX_T_ROOT", raising=False)
    profile = body()
    profile["production"]["port"] = "${HSX_T_PORT}"
    profile["host"]["home"] = "${HSX_T_ROOT:-/srv}/hsx"
    loaded = parse_profile(profile, "profile test")
    assert (loaded.production.port, loaded.host.home) == (31000, "/srv/hsx")


def test_every_problem_names_field_value_and_fix() -> None:
    profile = body()
    profile["data"]["shard_sise"] = 5
    profile["data"]["shard_size"] = "many"
    profile["production"]["port"] = 70000
    profile["host"]["home"] = "hsx"
    profile["capture"]["layers"] = [31, 3]
    del profile["model"]["path"]
    profile["cleanup"]["policy"] = "sometimes"
    found = problems(profile)
    assert len(found) == 7, found
    text = "\n".join(found)
    assert "data.shard_sise = 5: is not a setting (did you mean shard_size?)" in text
    assert "data.shard_size = 'many': " in text
    assert "a whole number" in text
    assert "production.port = 70000: " in text
    assert "at most 65535" in text
    assert "host.home = 'hsx': is not an absolute path (give a path that starts with /" in text
    assert "capture.layers = [31, 3]: layers must ascend" in text
    assert "model.path: is missing (add it)" in text
    assert "cleanup.policy = 'sometimes': " in text
    assert "'never', 'ask' or 'auto'" in text


@pytest.mark.parametrize("text", ["[1, 2]", "a: [", ""])
def test_what_is_no_profile_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    (tmp_path / "own.yaml").write_text(text)
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    with pytest.raises(ProfileError, match="profile own"):
        load_profile("own")


@pytest.mark.parametrize("name", ["nothing", "../profiles/kimi-k2.5", ""])
def test_unknown_profile_lists_the_known(name: str) -> None:
    with pytest.raises(ProfileError, match=r"known: .*kimi-k2\.5"):
        load_profile(name)


def test_own_profiles_come_first_and_win(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = body()
    own["data"]["shard_size"] = 7
    (tmp_path / "kimi-k2.5.yaml").write_text(yaml.safe_dump(own))
    (tmp_path / "zz.yaml").write_text(yaml.safe_dump(own))
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    assert list_profiles() == ["kimi-k2.5", "zz", "demo"]
    assert load_profile("kimi-k2.5").data.shard_size == 7


def test_default_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("PYTHON", "HOME", "OUTPUT", "MODEL", "PORT", "PLATFORM", "DATASET")
    for name in names:
        monkeypatch.delenv(f"HSX_DEMO_{name}", raising=False)
    monkeypatch.delenv("HSX_PROFILE", raising=False)
    monkeypatch.delenv("HSX_PROFILES", raising=False)
    assert default_profile() == "kimi-k2.5"  # the demo's variables are not set
    for name in names:
        monkeypatch.setenv(f"HSX_DEMO_{name}", "/x")
    assert default_profile() == "demo"
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(body()))
    monkeypatch.setenv("HSX_PROFILES", str(tmp_path))
    assert default_profile() == "mine"
    monkeypatch.setenv("HSX_PROFILE", "kimi-k2.5")
    assert default_profile() == "kimi-k2.5"


def test_a_manager_needs_its_words() -> None:
    profile = body()
    profile["production"] |= {"manager": "systemd"}
    assert any("manager systemd needs unit" in p for p in problems(profile))
    profile["production"] |= {"unit": "sglang; reboot"}
    assert any(p.startswith("production.unit") for p in problems(profile))
    profile["production"] |= {"unit": "sglang@kimi.service"}
    assert parse_profile(profile, "profile test").production.systemctl == ["systemctl"]
    profile["production"] |= {"manager": "command", "start_command": ["docker", "start", "sglang"]}
    assert any("stop_command" in p for p in problems(profile))
