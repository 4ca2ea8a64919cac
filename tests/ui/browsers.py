"""The machine's own Chromium, and a person who is logged in with it."""

from __future__ import annotations

import os
import shutil

from playwright.sync_api import Browser, BrowserContext

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
    raise FileNotFoundError("no Chromium on this machine: apt-get install chromium, or name one in HSX_CHROMIUM")


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
