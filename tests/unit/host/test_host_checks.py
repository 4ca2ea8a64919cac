"""Preflight, the plugin's folder, the RECORD check, and the benchmark's comparison."""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from host_lifecycle import make_spec, start_by_hand

from hsx_host import benchmark, lease, patch, preflight, serve, state
from hsx_host import contract as c
from hsx_host.errors import BadInput, Refused, TryAgain

# ---------------------------------------------------------------- preflight


def test_preflight_tells_the_facts(spec: c.RunSpec) -> None:
    found = preflight.run(spec, Namespace())
    assert found.python.startswith("3.")
    assert found.sglang.startswith("0.5.")
    assert found.output_free_bytes > 0
    assert not found.production_healthy
    assert any("production is not running" in w for w in found.warnings)
    serve.ensure(spec, "production")
    assert preflight.run(spec, Namespace()).production_healthy


def test_preflight_lists_all_that_is_wrong(spec: c.RunSpec, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    bad = replace(
        spec,
        host=replace(spec.host, python="/no/python", output_root="relative", home="/proc/hsx"),
        model=c.ModelSettings("/no/model"),
        extraction=replace(spec.extraction, args=[*spec.extraction.args, "--pp-size", "2"]),
    )
    with pytest.raises(BadInput) as e:
        preflight.run(bad, Namespace())
    for field in ("host.python", "host.output_root", "host.home", "model.path", "extraction.args"):
        assert field in e.value.doc.field, field
    assert "things are wrong" in str(e.value)


def test_preflight_refuses_other_production(spec: c.RunSpec) -> None:
    server = start_by_hand(spec, [*spec.production.args, "--tp", "2"])
    try:
        with pytest.raises(Refused, match="--tp-size"):
            preflight.run(spec, Namespace())
    finally:
        server.kill()
        server.wait()


@pytest.mark.parametrize(
    ("version", "fine"),
    [
        ("0.5.10", False),
        ("0.5.11", True),
        ("0.5.23", True),
        ("0.5.23+cu", True),
        ("0.5.15.post1", True),
        ("0.5.15.post1+cu130", True),
        ("0.6.0", False),
        ("1.0", False),
        ("0.5", False),
        ("", False),
        ("main", False),
        ("0.5.11rc1", False),
        ("0.6.0rc1", False),
        ("0.5.23.dev3", False),
        ("0.5.23.dev3+g12ab", False),
        ("0.5.24a0", False),
        ("0.5.9.post1", False),
    ],
)
def test_sglang_range(version: str, fine: bool) -> None:
    if fine:
        preflight.check_version(version)
    else:
        with pytest.raises(BadInput, match="sglang"):
            preflight.check_version(version)


def test_another_python_is_named() -> None:
    preflight.check_python(sys.executable)
    with pytest.raises(BadInput, match=r"host\.python"):
        preflight.check_python("/usr/bin/env")


def test_layers_of_another_model_are_refused(spec: c.RunSpec) -> None:
    for layers in ([8], [-1], []):
        with pytest.raises(BadInput, match=r"capture\.layers"):
            preflight.run(replace(spec, capture=replace(spec.capture, layers=layers)), Namespace())


# ---------------------------------------------------------------- patch


def test_the_plugin_is_put_in_place_by_content_and_repaired(spec: c.RunSpec) -> None:
    plugin_id, folder = patch.apply(spec)
    assert patch.tree_id(folder) == plugin_id == patch.source_id()
    assert (folder / "hsx_capture" / "__init__.py").is_file()
    assert list(folder.glob("*.dist-info/entry_points.txt"))
    assert patch.apply(spec) == (plugin_id, folder)
    (folder / "hsx_capture" / "__init__.py").write_text("edited")
    assert patch.apply(spec) == (plugin_id, folder)
    assert patch.tree_id(folder) == plugin_id
    patch.revert(spec)
    assert not folder.exists()
    patch.revert(spec)


def installed(folder: Path, name: str) -> Path:
    """A small distribution with a RECORD."""
    package, info = folder / name, folder / f"{name}-1.0.dist-info"
    package.mkdir()
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{info.name}/RECORD,,"]
    for file in ("__init__.py", "server.py", "kernel.so"):
        (package / file).write_text(file)
        digest = base64.urlsafe_b64encode(hashlib.sha256(file.encode()).digest()).rstrip(b"=").decode()
        lines.append(f"{name}/{file},sha256={digest},{len(file)}")
    (info / "RECORD").write_text("\n".join(lines) + "\n")
    return package


def test_record_check_names_what_is_not_as_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    package = installed(tmp_path, "hsx_fake_dist")
    assert patch.check_installed("hsx_fake_dist") == ("1.0", 3)
    (package / "server.py").write_text("patched")
    (package / "kernel.so").unlink()
    (package / "extra.py").write_text("added")
    with pytest.raises(Refused) as e:
        patch.check_installed("hsx_fake_dist")
    for word in ("changed: hsx_fake_dist/server.py", "missing: hsx_fake_dist/kernel.so", "extra.py", "3 files"):
        assert word in str(e.value)
    with pytest.raises(BadInput, match="not installed"):
        patch.check_installed("hsx_no_such_dist")


def test_the_installed_sglang_is_pristine(spec: c.RunSpec) -> None:
    report = patch.run(spec, Namespace(action="verify"))
    assert report.pristine
    assert report.files_checked > 1000
    assert report.seams == {}


# ---------------------------------------------------------------- benchmark

FIGURES = c.LoadFigures(18.1, 40.0, 160.0, 50.0, 2, 3.0)


def result(label: str, tok_s: float, baseline: c.BenchmarkResult | None = None) -> c.BenchmarkResult:
    return benchmark.compare(label, {"single": replace(FIGURES, output_tok_s=tok_s)}, baseline, 0.05)


def test_the_comparison_is_said_plainly() -> None:
    before = result("before", 18.1)
    assert before.text == "single: 18.1 tok/s"
    after = result("after", 17.9, before)
    assert after.text == "single: 17.9 tok/s, 0.99 of the baseline 18.1"
    assert after.within_tolerance
    assert result("after", 18.1 * 0.951, before).within_tolerance
    slow = result("after", 9.0, before)
    assert not slow.within_tolerance
    assert "slower than 0.95 of the baseline: single" in slow.text
    assert "no baseline" in result("after", 18.0).text


def test_a_slow_load_is_measured_again_and_its_best_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise slows a load down once; a slower production stays slower."""
    spec = replace(make_spec(tmp_path), benchmark=c.BenchmarkSettings(True, {"single": c.BenchmarkLoad(2, 8, 4, 1)}))
    monkeypatch.setattr(serve.health, "problem", lambda settings: "")
    for after, good, measured in (([10.0, 18.0], True, 2), ([10.0, 11.0, 9.0], False, 3)):
        said = iter([18.1, *after])
        asked: list[object] = []

        def measure(spec: c.RunSpec, only: object = None, said: Any = said, asked: Any = asked) -> Any:
            asked.append(only)
            return {"single": replace(FIGURES, output_tok_s=next(said))}

        monkeypatch.setattr(benchmark, "measure", measure)
        benchmark.run(spec, Namespace(label="before"))
        assert benchmark.run(spec, Namespace(label="after")).within_tolerance is good
        assert len(asked) == 1 + measured


def test_bench_output_is_parsed_and_failed_requests_count() -> None:
    body = {
        "output_throughput": 18.5, "total_throughput": 55.0, "mean_ttft_ms": 160.0, "mean_tpot_ms": 52.0,
        "completed": 2, "duration": 1.7,
    }  # fmt: skip
    load = c.BenchmarkLoad(2, 8, 4, 1)
    assert benchmark.parse(json.dumps(body) + "\n", "single", load).output_tok_s == 18.5
    with pytest.raises(TryAgain, match="2 of 3"):
        benchmark.parse(json.dumps(body), "single", replace(load, prompts=3))
    with pytest.raises(TryAgain, match="nothing"):
        benchmark.parse("", "single", load)


def test_a_borrowed_host_is_no_baseline(spec: c.RunSpec) -> None:
    lease.acquire(replace(spec, run_id="another"))
    with pytest.raises(TryAgain, match="held by run another"):
        benchmark.run(spec, Namespace(label="before"))


def test_a_dead_production_is_not_measured_and_off_is_said(spec: c.RunSpec) -> None:
    with pytest.raises(TryAgain, match="production does not serve"):
        benchmark.run(spec, Namespace(label="before"))
    off = replace(spec, benchmark=replace(spec.benchmark, enabled=False))
    answer = benchmark.run(off, Namespace(label="after"))
    assert (answer.text, answer.within_tolerance) == ("the benchmark is switched off", True)
    assert (state.run_dir(spec) / "benchmark-after.json").exists()
