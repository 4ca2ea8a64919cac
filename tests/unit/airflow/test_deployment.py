"""Dockerfile, docker-compose.yaml and the Helm values agree with each other and with requirements.txt."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

REPO = Path(__file__).resolve().parents[3]
ONCE = {"prepare", "init"}
SECRETS, PROFILES = "/opt/airflow/secrets", "/opt/airflow/profiles"


def read(name: str) -> str:
    return (REPO / name).read_text()


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(read("docker-compose.yaml"))["services"]
    return found


def test_airflow_has_one_version_everywhere(services: dict[str, Any]) -> None:
    pinned = re.search(r"^apache-airflow==(\S+)", read("requirements.txt"), flags=re.M)
    assert pinned
    values = yaml.safe_load(read("deploy/kubernetes/values.yaml"))
    assert f"FROM apache/airflow:{pinned[1]}\n" in read("Dockerfile")
    assert {s["image"] for s in services.values() if "build" in s} == {f"hsx-airflow:{pinned[1]}"}
    assert values["airflowVersion"] == values["images"]["airflow"]["tag"] == pinned[1]
    assert f"apache/airflow:{pinned[1]} " in read("tests/compose/stand_ins.sh")
    assert f"hsx-airflow:{pinned[1]} " in read("docs/install.md")


def test_what_runs_on_comes_back_and_tells_its_health(services: dict[str, Any]) -> None:
    for name, service in services.items():
        assert not service["image"].endswith(":latest")
        assert ":" in service["image"]
        assert service["restart"] == ("no" if name in ONCE else "unless-stopped"), name
        assert ("healthcheck" in service) == (name not in ONCE), name


def test_keys_and_profiles_are_mounted_read_only_at_the_images_places(services: dict[str, Any]) -> None:
    for name, service in services.items():
        binds = {v["target"]: v for v in service["volumes"] if isinstance(v, dict)} if "volumes" in service else {}
        assert set(binds) == ({SECRETS, PROFILES} if "build" in service else set()), name
        assert all(v["read_only"] and not v["bind"]["create_host_path"] for v in binds.values())
    values = yaml.safe_load(read("deploy/kubernetes/values.yaml"))
    assert {(m["mountPath"], m["readOnly"]) for m in values["volumeMounts"]} == {(SECRETS, True), (PROFILES, True)}
    assert {v["name"] for v in values["volumes"]} == {m["name"] for m in values["volumeMounts"]}
    dockerfile = read("Dockerfile")
    assert f"ln -s {SECRETS}/known_hosts" in dockerfile
    assert f"HSX_PROFILES={PROFILES}" in dockerfile


def test_no_secret_has_a_default(services: dict[str, Any]) -> None:
    text, example = read("docker-compose.yaml"), read("env.example")
    asked = set(re.findall(r"\$\{([A-Z_]+):\?", text))
    assert asked == set(re.findall(r"^([A-Z_]+)=$", example, flags=re.M))
    for name in re.findall(r"\$\{([A-Z_]+):-", text):
        assert re.search(rf"^#?{name}=", example, flags=re.M), f"env.example does not tell {name}"


def test_the_image_holds_what_airflow_runs_and_no_keys() -> None:
    ignored = read(".dockerignore").splitlines()
    assert "*" in ignored
    assert {line for line in ignored if line.startswith("!")} == {"!requirements.txt", "!dags", "!plugins", "!include"}


def test_every_way_lets_one_run_have_as_many_shards() -> None:
    wanted = "10000"
    values = yaml.safe_load(read("deploy/kubernetes/values.yaml"))
    assert {v["name"]: v["value"] for v in values["env"]}["AIRFLOW__CORE__MAX_MAP_LENGTH"] == wanted
    assert f"AIRFLOW__CORE__MAX_MAP_LENGTH:-{wanted}}}" in read("docker-compose.yaml")
    assert read("docs/install.md").count(f"AIRFLOW__CORE__MAX_MAP_LENGTH={wanted}") == 2  # another Airflow, Astro
