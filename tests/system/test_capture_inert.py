"""Where nothing may be captured: production, a plugin without a spec, and a spec that the model refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import models
import pytest
from capture_client import Client
from sglang_server import CAPTURE, CHUNK, CPU, Server

HOOKS = """
from sglang.srt.plugins import load_plugins
from sglang.srt.plugins.hook_registry import HookRegistry
from sglang.srt.layers.logits_processor import LogitsProcessor
import sys
load_plugins()
print(sorted(HookRegistry._hooks), hasattr(LogitsProcessor.forward, "__wrapped__"), "hsx_capture.seams" in sys.modules)
"""


@pytest.mark.parametrize(
    ("path", "spec", "hooks"),
    [
        ([CPU], True, 0),  # production: the plugin can't be found, whatever the environment says
        ([CPU, CAPTURE], False, 0),  # the plugin without a spec
        ([CPU, CAPTURE], True, 2),  # extraction
    ],
)
def test_hooks_exist_only_in_an_extraction_server(path: list[Path], spec: bool, hooks: int, tmp_path: Path) -> None:
    env = {k: v for k, v in os.environ.items() if k != "HSX_CAPTURE_SPEC"}
    env["PYTHONPATH"] = os.pathsep.join(map(str, path))
    if spec:
        env["HSX_CAPTURE_SPEC"] = str(tmp_path / "spec.json")
    done = subprocess.run([sys.executable, "-c", HOOKS], env=env, capture_output=True, text=True, check=True)
    last = done.stdout.strip().splitlines()[-1]
    assert last.count("sglang.srt.") == hooks, last
    assert last.endswith(f"{bool(hooks)} {bool(hooks)}"), last


@pytest.fixture(scope="module")
def refused(tiny_llama: Path, start_sglang: Callable[..., Server], tmp_path_factory: pytest.TempPathFactory) -> Client:
    """A server whose spec names a layer that the model doesn't have."""
    client = Client(tmp_path_factory.mktemp("spool"), [2, 8], models.HIDDEN["llama"], models.BLOCKS["llama"])
    client.server = start_sglang(tiny_llama, spec=client.write_spec())
    return client


def test_a_layer_that_the_model_does_not_have_is_refused_at_the_start(refused: Client) -> None:
    (ready,) = refused.ready()
    assert "CaptureSpec.layers = [2, 8]: expected ascending layers from 1 to 7" in ready["error"]
    assert ready["layers_to_capture"] == []
    assert not (refused.spool / "final_norm.safetensors").exists()


def test_a_refused_plugin_captures_nothing_and_the_server_serves(refused: Client) -> None:
    ids = models.prompt(1, 30)
    rid = refused.ask(ids)
    refused.post(ids, rid)
    assert refused.server is not None
    assert refused.server.generate(ids, tokens=4)["meta_info"]["completion_tokens"] == 4
    assert not (refused.spool / f"{rid}.done.json").exists()


def test_capture_does_not_change_an_answer(refused: Client, capturing_llama: Client) -> None:
    plain, capturing = refused.server, capturing_llama.server
    assert plain is not None
    assert capturing is not None
    for length in (1, 19, CHUNK, CHUNK + 1, 700):
        ids = models.prompt(length, length)
        want = plain.generate(ids, tokens=8)["output_ids"]
        _, _, token = capturing_llama.capture(ids)
        assert token == want[0]
        assert capturing.generate(ids, tokens=8)["output_ids"] == want
