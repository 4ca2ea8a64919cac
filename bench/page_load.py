"""How long the page takes with 10,000 samples in 500 shards: the answer of the api-server, and the page in a browser.

    make bench-page

A throw-away Airflow (SQLite, one api-server worker) with one seeded run of 500 shards that goes on, and Chromium.
Prints medians of ten; no time is asserted.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import requests
from playwright.sync_api import sync_playwright

REPO = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(REPO / "tests" / "ui"), str(REPO / "plugins"), str(REPO / "include")]

from browsers import FLAGS, WAIT_MS, chromium, logged_in  # noqa: E402

from hsx_demo.components import Airflow, new_airflow  # noqa: E402

SHARDS, SAMPLES, ROUNDS = 500, 20, 10


def main() -> None:
    """Measure and print."""
    with tempfile.TemporaryDirectory(prefix="hsx-page-") as folder:
        rooms = f"{REPO / 'plugins'}:{REPO / 'include'}"
        airflow = new_airflow(Path(folder) / "airflow", {"PYTHONPATH": rooms})
        airflow.command("dags", "reserialize")
        seed = [sys.executable, str(REPO / "tests/ui/seed.py"), "--shards", str(SHARDS), "--samples", str(SAMPLES)]
        subprocess.run(seed, env=airflow.env, cwd=airflow.home, check=True, capture_output=True)
        airflow.start("api-server")
        try:
            measure(airflow)
        finally:
            airflow.stop()


def measure(airflow: Airflow) -> None:
    """The first request, the next ones, and the page from navigation to its first whole drawing."""
    session = requests.Session()
    session.trust_env = False
    until = time.monotonic() + 180
    while True:
        try:
            session.get(f"{airflow.url}/api/v2/version", timeout=10).raise_for_status()
            break
        except requests.RequestException:
            if time.monotonic() > until:
                raise
            time.sleep(1)
    login = {"username": "admin", "password": airflow.password}
    token = session.post(f"{airflow.url}/auth/token", json=login, timeout=60).json()["access_token"]
    session.headers["Authorization"] = f"Bearer {token}"
    answers = []
    for _ in range(ROUNDS + 1):
        began = time.perf_counter()
        answer = session.get(f"{airflow.url}/hsx/api/overview", timeout=60)
        answers.append(time.perf_counter() - began)
        answer.raise_for_status()
    run = answer.json()["run"]
    assert len(run["shards"]) == SHARDS
    assert run["totals"]["samples_todo"] == SHARDS * SAMPLES
    loads = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium(), args=FLAGS)
        context = logged_in(browser, airflow.url, airflow.password)
        context.set_default_timeout(WAIT_MS)
        for _ in range(ROUNDS + 1):
            page = context.new_page()
            page.goto(f"{airflow.url}/hsx/")
            page.locator("html[data-ready]").wait_for()
            assert page.locator("a.cell").count() == SHARDS
            loads.append(page.evaluate("performance.getEntriesByName('hsx-ready')[0].startTime") / 1000)
            page.close()
        browser.close()
    size = len(answer.content)
    print(f"{SHARDS * SAMPLES:,} samples in {SHARDS} shards; the answer has {size / 1024:.0f} KiB before compression")
    report = {
        "api_first_s": round(answers[0], 3),
        "api_median_s": round(statistics.median(answers[1:]), 3),
        "page_first_s": round(loads[0], 3),
        "page_median_s": round(statistics.median(loads[1:]), 3),
        "page_slowest_s": round(max(loads[1:]), 3),
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
