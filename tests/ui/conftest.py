"""A real Airflow with a real host behind it, and a real browser in front. Pictures go to $HSX_SCREENSHOTS."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browsers import FLAGS, chromium, logged_in
from playwright.sync_api import Browser, BrowserContext, Locator, Page, sync_playwright
from stands import sglang_python, tiny_model, write_samples

from hsx_demo.client import AirflowClient
from hsx_demo.stack import Stack

REPO = Path(__file__).resolve().parents[2]
PICTURES = Path(os.environ.get("HSX_SCREENSHOTS") or REPO / "build" / "ui")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


def picture(of: Page | Locator, name: str, *, whole: bool = False) -> None:
    """Keep what a person sees: what fits the window, the ``whole`` page, or a part of it."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    options: Any = {"full_page": True} if whole else {}
    of.screenshot(path=PICTURES / f"{name}.png", animations="disabled", **options)


@pytest.fixture(scope="session")
def stand(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """The borrowed host with production on a tiny model, and Airflow beside it."""
    work = Path(tempfile.mkdtemp(prefix="hsx-"))  # its name is in pictures
    with Stack(
        work / "s",
        python_host=sglang_python(),
        model=tiny_model(work / "model"),
        # enough of them that a shard takes a while on a CPU
        dataset=write_samples(work / "chats.jsonl", samples=360, shortest=100, longest=1399),
        profile="ui",
        extra_env={"HSX_PROFILES": str(Path(__file__).parent / "profiles")},
    ) as stack:
        yield stack.start()
    if not request.session.testsfailed:  # else its logs are wanted
        shutil.rmtree(work)


@pytest.fixture(scope="session")
def client(stand: Stack) -> AirflowClient:
    """The REST API, to bring runs about."""
    assert stand.airflow is not None
    return stand.airflow.client()


@pytest.fixture(scope="session")
def desk(browser: Browser, stand: Stack) -> Iterator[BrowserContext]:
    """A person at a desk."""
    assert stand.airflow is not None
    context = logged_in(browser, stand.airflow.url, stand.airflow.password)
    yield context
    context.close()


@pytest.fixture
def page(desk: BrowserContext) -> Iterator[Page]:
    """A tab; errors of any script on it fail the test."""
    page, errors = desk.new_page(), []
    page.on("pageerror", lambda e: errors.append(str(e)))
    yield page
    page.close()
    assert errors == []
