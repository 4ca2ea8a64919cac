"""A real Airflow with a real host behind it, and a real browser in front. Pictures go to $HSX_SCREENSHOTS."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from browsers import FLAGS, chromium, logged_in
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
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


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    """Keep what a person sees."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=whole, animations="disabled")


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The borrowed host with production on a tiny model, and Airflow beside it."""
    work = tmp_path_factory.mktemp("ui")
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
