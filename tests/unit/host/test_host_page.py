"""A guard that can't bring production back wakes somebody by the profile's command, once, and tells when it is back."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from host_lifecycle import events, verb, wait_for, with_env, write_spec

from hsx_host import borrow, lease, page, procid, serve, state
from hsx_host import contract as c
from hsx_host.errors import BadInput, TryAgain
from hsx_host.preflight import _check_page_command

WAKE = "import sys; open(sys.argv[1], 'a').write(sys.argv[2].replace(chr(10), ' ') + chr(10))"
WHY = TryAgain("the production server ended before it was ready")


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    return tmp_path / "pages.txt"


@pytest.fixture
def paged(spec: c.RunSpec, pages: Path) -> c.RunSpec:
    return replace(spec, page_command=[sys.executable, "-c", WAKE, str(pages)])


def grant(spec: c.RunSpec) -> c.Lease:
    state.run_dir(spec)
    return c.Lease(spec.run_id, 5.0, 0.0)


def test_a_guard_pages_and_says_when_production_is_back(paged: c.RunSpec, pages: Path, tmp_path: Path) -> None:
    """Two guards, and each tries: one page of each kind."""
    broken = tmp_path / "broken"
    spec = with_env(replace(paged, lease_ttl_s=2.0), "production", FAKE_DIE_WHILE=str(broken))
    serve.ensure(spec, "production")
    borrow.acquire(spec, by_step=False)
    serve.ensure(spec, "stopped")
    broken.touch()
    wait_for(lambda: events(spec).count("guard: production is not back yet") >= 2, 120)
    assert len(pages.read_text().splitlines()) == 1
    broken.unlink()
    wait_for(lambda: lease.read(spec) is None and pages.read_text().count("\n") == 2, 120)
    down, back = pages.read_text().splitlines()
    for word in ("PRODUCTION MAY BE DOWN", "run-1", "ended before it was ready", "hsx_host restore --now"):
        assert word in down
    assert back.startswith("production is back on host ")
    assert not list((state.home(spec) / "runs").glob("*/paged.json"))


def test_again_after_an_hour_and_after_a_reboot(paged: c.RunSpec, pages: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = grant(paged)
    for _ in range(2):
        page.not_restored(paged, held, WHY)
    assert len(pages.read_text().splitlines()) == 1
    monkeypatch.setattr(page, "AGAIN_S", 0.0)
    page.not_restored(paged, held, WHY)
    assert len(pages.read_text().splitlines()) == 2
    monkeypatch.setattr(page, "AGAIN_S", 3600.0)
    monkeypatch.setattr(procid, "boot_id", lambda: "another")
    page.not_restored(paged, held, WHY)
    assert len(pages.read_text().splitlines()) == 3
    page.restored(paged, replace(held, since=6.0))
    page.restored(paged, held)
    page.restored(paged, held)
    assert pages.read_text().count("production is back") == 1


def test_a_pager_that_fails_keeps_nobody_from_anything(spec: c.RunSpec, pages: Path) -> None:
    for command in (["/no/such/program"], [sys.executable, "-c", "raise SystemExit('no line')"]):
        broken = replace(spec, run_id=command[0], page_command=command)
        page.not_restored(broken, grant(broken), WHY)
        assert events(broken)[-1] == "paging failed"
    page.not_restored(spec, grant(spec), WHY)
    page.restored(spec, grant(spec))
    assert not pages.exists()


def test_the_text_reaches_the_pager_as_one_word(paged: c.RunSpec, pages: Path) -> None:
    """No shell reads it, whatever a server's log has in it."""
    page.not_restored(paged, grant(paged), TryAgain("$(touch HIT) `touch HIT` 'a' \"b\" ; touch HIT"))
    assert "$(touch HIT) `touch HIT` 'a' \"b\" ; touch HIT" in pages.read_text()
    assert not Path("/HIT").exists()


def test_a_pager_that_is_not_there_is_found_while_people_are_awake(spec: c.RunSpec, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"alerts\.host_command = '/no/such/pager'"):
        _check_page_command(replace(spec, page_command=["/no/such/pager"]))
    said = verb("preflight", "--spec", write_spec(replace(spec, page_command=["/no/such/pager"]), tmp_path), check=2)
    assert "alerts.host_command" in said["message"] + said["field"]
