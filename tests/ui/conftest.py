"""A real Airflow with a real host behind it, and a real browser in front. Pictures go to $HSX_SCREENSHOTS."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from hsx_demo.client import AirflowClient
from hsx_demo.stack import Stack

REPO = Path(__file__).resolve().parents[2]
PICTURES = Path(os.environ.get("HSX_SCREENSHOTS") or REPO / "build" / "ui")
#: Nothing of the browser looks for a network beyond the loopback.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WAIT_MS = 120_000
DESK, PHONE = {"width": 1360, "height": 860}, {"width": 390, "height": 844}


def chromium() -> str:
    """The machine's own browser."""
    for name in (os.environ.get("HSX_CHROMIUM", ""), "chromium", "chromium-browser", "google-chrome"):
        if name and (found := shutil.which(name)):
            return found
    pytest.fail("no Chromium on this machine: apt-get install chromium, or name one in HSX_CHROMIUM")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        yield browser
        browser.close()


def logged_in(
    browser: Browser, url: str, password: str, *, theme: str = "light", phone: bool = False
) -> BrowserContext:
    """A person at Airflow's UI, by its own login form."""
    context = browser.new_context(
        viewport=PHONE if phone else DESK, device_scale_factor=2 if phone else 1, has_touch=phone, timezone_id="UTC"
    )
    context.set_default_timeout(WAIT_MS)
    context.add_init_script(f"try {{ localStorage.setItem('theme', '{theme}') }} catch {{}}")
    page = context.new_page()
    page.goto(f"{url}/auth/login?next={url}/")
    page.fill("input[name=username]", "admin")
    page.fill("input[name=password]", password)
    page.click("button[type=submit]")
    page.wait_for_url(lambda at: "/auth/login" not in at)
    page.close()
    return context


def picture(page: Page, name: str, *, whole: bool = False) -> None:
    """Keep what a person sees."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=PICTURES / f"{name}.png", full_page=whole, animations="disabled")


@pytest.fixture(scope="session")
def stand(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The borrowed host with production on a tiny model, and Airflow beside it."""
    from samples import write_chats

    python = os.environ.get("HSX_HOST_PYTHON", "")
    if not python:
        pytest.fail("HSX_HOST_PYTHON is not set: the Python that runs SGLang (make test-ui sets it)")
    work = tmp_path_factory.mktemp("ui")
    code = "import pathlib, sys, models; models.build('llama', pathlib.Path(sys.argv[1]))"
    env = {**os.environ, "PYTHONPATH": str(REPO / "tests" / "system")}
    subprocess.run([python, "-c", code, str(work / "model")], env=env, check=True, capture_output=True, timeout=600)
    stack = Stack(
        work / "s",
        python_host=python,
        model=work / "model",
        dataset=write_chats(work / "chats.jsonl"),
        profile="ui",
        extra_env={"HSX_PROFILES": str(Path(__file__).parent / "profiles")},
    )
    try:
        stack.start_host()
        stack.launch_production()
        stack.start_airflow()
        stack.wait_production()
        yield stack
    finally:
        stack.stop()


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
