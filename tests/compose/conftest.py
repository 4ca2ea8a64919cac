"""docker-compose.yaml brought up as docs/install.md says, in a copy of the checkout, beside a real host.

Needs Docker. ``HSX_COMPOSE`` is the command of Compose, version 2 (``make test-compose`` sets it). Where no registry is
reached, ``HSX_COMPOSE_BASE`` names a Debian 12 image from which stand-ins for the registry's images are built.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest
from deployment import HERE, WIDE_SHARDS, Deployment, docker, lay_out, write_profiles
from install_doc import REPO
from stands import sglang_python, tiny_model, write_samples

from hsx_demo.sshd import free_port
from hsx_demo.stack import Stack


@pytest.fixture(scope="session")
def images() -> None:
    """Docker answers, and the registry's images or their stand-ins are here."""
    docker("version")
    if base := os.environ.get("HSX_COMPOSE_BASE"):
        subprocess.run([HERE / "stand_ins.sh", base], check=True, timeout=1200)


@pytest.fixture(scope="session")
def network(images: None) -> Iterator[str]:
    """A network whose address on this machine is known before Compose starts: the host's SSH server listens there."""
    name = f"hsx-test-{uuid.uuid4().hex[:8]}"
    docker("network", "create", name)
    yield name
    docker("network", "rm", name)


@pytest.fixture(scope="session")
def stack(network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The borrowed host: production with a tiny random model, and an SSH server that containers reach."""
    work = tmp_path_factory.mktemp("compose")
    write_profiles(work / "profiles")
    wide = write_samples(work / "wide.jsonl", samples=2 * WIDE_SHARDS, shortest=8, longest=39)
    with Stack(
        work / "s",
        python_host=sglang_python(),
        model=tiny_model(work / "model"),
        dataset=write_samples(work / "few.jsonl", samples=20, shortest=8, longest=299),
        profile="compose",
        extra_env={"HSX_PROFILES": str(work / "profiles"), "HSX_TEST_WIDE": str(wide)},
    ) as stack:
        gateway = docker("network", "inspect", "--format", "{{(index .IPAM.Config 0).Gateway}}", network)
        stack.start_host(listen=gateway)
        stack.launch_production()
        stack.wait_production()
        yield stack


@pytest.fixture(scope="session")
def deployment(stack: Stack, network: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Everything up and healthy; taken down with its volumes at the end."""
    checkout = tmp_path_factory.mktemp("clone") / "hsx"
    ignored = shutil.ignore_patterns(".git", "build", "__pycache__", ".*_cache", ".env", "secrets")
    shutil.copytree(REPO, checkout, ignore=ignored)
    made = Deployment(checkout, network, stack, free_port())
    lay_out(made)
    try:
        made.compose("build")
        try:
            made.compose("up", "--detach", "--wait")
            yield made
        finally:
            (stack.work / "compose.log").write_text(made.compose("logs", "--no-color", "--timestamps", check=False))
    finally:
        made.compose("down", "--volumes", "--remove-orphans", "--timeout", "20", check=False)
