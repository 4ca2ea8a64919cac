"""A person in front of Airflow's UI: triggers, watches, finds the failure, clears the shard, reads the results.

One story, in this order; each picture of docs/images is taken where the story has it (``make screenshots``).
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlencode

import pytest
import requests
from browsers import logged_in
from conftest import picture
from playwright.sync_api import Browser, BrowserContext, FrameLocator, Page, expect
from stands import write_samples

from hsx_demo.client import AirflowClient, Task
from hsx_demo.stack import DAG_ID, Stack

RUN_TIMEOUT_S = 1500.0
RUNS: dict[str, str] = {}
SECTIONS = (  # of the trigger form, what stands in each, and its picture
    ("What to extract", ("Profile", "Data set", "Shards", "Dry run"), "trigger-form"),
    ("Where it goes", ("Output", "Formats", "Old hidden states"), "trigger-form-where"),
    ("The borrowed host", ("Stop after", "Benchmark of production"), "trigger-form-host"),
)

expect.set_options(timeout=120_000)


def url(stand: Stack) -> str:
    assert stand.airflow is not None
    return stand.airflow.url


def of_run(run: str) -> str:
    """The page's query for a run; none: the run that goes on, or the last."""
    return f"?{urlencode({'dag': DAG_ID, 'run': run})}" if run else ""


def hidden_states(page: Page, stand: Stack, run: str = "") -> FrameLocator:
    """The page, in Airflow's frame."""
    page.goto(f"{url(stand)}/plugin/hidden-states/hsx/{of_run(run)}")
    frame = page.frame_locator("iframe")
    frame.locator("html[data-ready]").wait_for()
    return frame


def whole(context: BrowserContext, stand: Stack, name: str, run: str = "") -> None:
    """A picture of the page from top to bottom, without Airflow's frame."""
    page = context.new_page()
    page.goto(f"{url(stand)}/hsx/{of_run(run)}")
    page.locator("html[data-ready]").wait_for()
    picture(page, name, whole=True)
    page.close()


def until_published(
    stand: Stack, client: AirflowClient, run: str, enough: Callable[[list[int]], bool], dataset: str = "chats"
) -> None:
    """Until the numbers of published samples, by shard, are as wanted and the run goes on."""
    assert stand.output is not None
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while True:
        files = stand.output.glob(f"ui-{dataset}-*/shards/*/manifest.jsonl")
        if enough([len(f.read_text().splitlines()) for f in files]):
            return
        assert client.run_state(DAG_ID, run) in ("queued", "running")
        assert time.monotonic() < deadline
        time.sleep(0.1)


# ------------------------------------------------------------------------------ the door


@pytest.mark.parametrize("path", ["api/overview", "static/main.js", "static/vendor/chart.umd.min.js"])
def test_nobody_reads_without_airflow_s_login(stand: Stack, path: str) -> None:
    session = requests.Session()
    session.trust_env = False
    assert session.get(f"{url(stand)}/hsx/{path}", timeout=60).status_code == 401
    assert session.get(f"{url(stand)}/hsx/{path}", timeout=60, cookies={"_token": "made.up.token"}).status_code in (
        401,
        403,
    )


def test_a_stranger_is_sent_to_the_login_and_comes_back(browser: Browser, stand: Stack) -> None:
    assert stand.airflow is not None
    context = browser.new_context()
    page = context.new_page()
    page.goto(f"{url(stand)}/hsx/")
    assert "/auth/login" in page.url
    page.fill("input[name=username]", "admin")
    page.fill("input[name=password]", stand.airflow.password)
    page.click("button[type=submit]")
    page.wait_for_url("**/hsx/**")
    expect(page.get_by_role("heading", name="Hidden states")).to_be_visible()
    context.close()


def test_an_airflow_without_a_run_says_what_to_do(page: Page, stand: Stack) -> None:
    frame = hidden_states(page, stand)
    expect(frame.get_by_text("No run of hsx yet")).to_be_visible()
    expect(frame.get_by_text("No run has looked at a host yet")).to_be_visible()
    expect(page.get_by_role("link", name="Hidden states")).to_be_visible()  # in the navigation
    picture(page, "page-empty")


# ------------------------------------------------------------------------------ trigger, and a dry run


def test_the_trigger_form_reads_like_a_form_for_people(page: Page, stand: Stack) -> None:
    page.set_viewport_size({"width": 1100, "height": 1500})
    page.goto(f"{url(stand)}/dags/{DAG_ID}")
    page.get_by_role("button", name="Trigger").first.click()
    expect(page.get_by_role("dialog")).to_be_visible()
    dialog = page.get_by_role("dialog")
    for section, titles, name in SECTIONS:
        dialog.get_by_role("button", name=section).click()  # one is open at a time
        for title in titles:
            expect(
                dialog.get_by_text(re.compile(rf"^{title}\s*\*?$")).first
            ).to_be_visible()  # * where it must be filled
        picture(page, name)
    expect(dialog.get_by_role("button", name="Trigger").last).to_be_enabled()  # as it stands, nothing is missing


def test_a_dry_run_is_answered_on_the_page_without_logs(page: Page, stand: Stack, client: AirflowClient) -> None:
    run = RUNS["dry"] = client.trigger(DAG_ID, {"dry_run": True})
    assert client.watch(DAG_ID, run, timeout_s=RUN_TIMEOUT_S) == "success"
    frame = hidden_states(page, stand, run)
    expect(frame.get_by_role("heading", name="A dry run: what would happen")).to_be_visible()
    expect(frame.get_by_text("Would extract 360 samples in 6 shards").first).to_be_visible()
    expect(frame.get_by_text("this profile has not extracted on this host yet")).to_be_visible()
    expect(frame.get_by_text("Nothing would be deleted.")).to_be_visible()


# ------------------------------------------------------------------------------ while it runs


def shard_that_tells(client: AirflowClient, run: str) -> Task:
    """The shard at work, once its task has its name and its log a rate: neither is so in its first seconds."""
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while time.monotonic() < deadline:
        for task in client.tasks(DAG_ID, run):
            at_work = task.task_id == "extract" and task.state in ("running", "deferred")
            if at_work and task.label.startswith("shard 0000"):
                lines = client.log_lines(DAG_ID, run, task)
                if any(re.search(r"extract: \d+ of 60 .*tokens/s.*to go", line) for line in lines):
                    return task
        time.sleep(0.5)
    raise AssertionError("no shard has told its rate")


def test_progress_is_live_on_the_page_in_the_log_and_linked_from_the_task(
    page: Page, desk: BrowserContext, browser: Browser, stand: Stack, client: AirflowClient
) -> None:
    assert stand.airflow is not None
    run = RUNS["real"] = client.trigger(DAG_ID, {})
    until_published(stand, client, run, lambda counts: sum(counts) >= 20)
    frame = hidden_states(page, stand)  # the run that goes on is shown by itself
    expect(frame.get_by_text(run, exact=True).first).to_be_visible()
    expect(frame.locator("a.cell.running")).to_have_count(1)
    expect(frame.locator("#read")).to_contain_text("live")
    expect(frame.locator("#host ~ *, section[aria-labelledby=host]").first).to_contain_text("extraction")

    def samples() -> int:
        text = frame.locator(".figure").filter(has_text="Samples").locator("dd").inner_text()
        return int(text.splitlines()[0].replace(",", ""))

    before = samples()
    deadline = time.monotonic() + RUN_TIMEOUT_S
    while samples() <= before:  # without a reload
        assert time.monotonic() < deadline
        page.wait_for_timeout(500)
    expect(frame.locator(".figure").filter(has_text="Rate").locator("dd")).to_contain_text("tok/s")
    expect(frame.locator(".figure").filter(has_text="Time to go").locator("dd")).to_contain_text(
        re.compile(r"\d (s|min)")
    )
    expect(frame.locator("#rates-chart")).to_be_visible()
    picture(page, "page-running")
    whole(desk, stand, "page-running-whole")
    for theme, phone, name in (("dark", False, "page-running-dark"), ("light", True, "page-running-phone")):
        context = logged_in(browser, stand.airflow.url, stand.airflow.password, theme=theme, phone=phone)
        if phone:
            whole(context, stand, name)
        else:
            tab = context.new_page()
            expect(hidden_states(tab, stand).locator("html")).to_have_attribute("data-theme", "dark")
            picture(tab, name)
        context.close()

    # the task itself: named by its shard, its log tells the rate, its link leads to the page while it runs
    task = shard_that_tells(client, run)
    link = client.get(f"dags/{DAG_ID}/dagRuns/{run}/taskInstances/extract/links", map_index=task.map_index)[
        "extra_links"
    ]
    assert f"/plugin/hidden-states/hsx/?dag={DAG_ID}" in link["Hidden states"]
    page.goto(f"{url(stand)}/dags/{DAG_ID}/runs/{run}/tasks/extract/mapped/{task.map_index}")
    expect(page.get_by_text(re.compile(r"extract: \d+ of 60 ")).first).to_be_visible()
    picture(page, "task-running")
    page.get_by_role("link", name="Details").click()
    page.locator(f"a[href*='/plugin/hidden-states/hsx/?dag={DAG_ID}']", has_text="Hidden states").click()
    expect(page.frame_locator("iframe").get_by_text(run, exact=True).first).to_be_visible()


def test_the_page_is_used_by_keyboard_alone(page: Page, stand: Stack) -> None:
    page.goto(f"{url(stand)}/hsx/{of_run(RUNS['real'])}")
    page.locator("html[data-ready]").wait_for()
    page.locator("a.cell[tabindex='0']").focus()
    at = int(page.evaluate("document.activeElement.dataset.i"))
    page.keyboard.press("Home")
    assert page.evaluate("document.activeElement.dataset.i") == "0"
    page.keyboard.press("ArrowRight")
    assert page.evaluate("document.activeElement.dataset.i") == "1"
    expect(page.locator(".details")).to_contain_text("shard 00001")
    page.keyboard.press("End")
    assert page.evaluate("document.activeElement.dataset.i") == "5"
    assert page.locator("a.cell[tabindex='0']").count() == 1  # one stop for the Tab key
    assert 0 <= at <= 5
    page.wait_for_timeout(2500)  # it draws itself anew each second: the focus stays
    assert page.evaluate("document.activeElement.dataset.i") == "5"
    page.keyboard.press("Enter")
    page.wait_for_url("**/dags/**")


# ------------------------------------------------------------------------------ a failed shard, and its second try


def test_a_failed_shard_is_told_with_its_reason_and_cleared_in_the_ui(
    page: Page, desk: BrowserContext, stand: Stack, client: AirflowClient
) -> None:
    run = RUNS["real"]
    server = json.loads((stand.host_dir / "hsx" / "state" / "server.json").read_text())
    assert server["mode"] == "extraction"
    # in the middle of a shard (of 60): between two, the next one would start it anew
    until_published(stand, client, run, lambda counts: any(1 <= n <= 30 for n in counts))
    os.killpg(server["pid"], signal.SIGKILL)
    assert client.watch(DAG_ID, run, timeout_s=RUN_TIMEOUT_S) == "failed"
    failed = [t for t in client.tasks(DAG_ID, run) if t.task_id == "extract" and t.state == "failed"]
    assert failed
    frame = hidden_states(page, stand, run)
    expect(frame.locator("a.cell.failed")).to_have_count(len(failed))
    expect(frame.get_by_role("heading", name="Failures")).to_be_visible()
    expect(frame.locator(".reason").first).to_contain_text("of shard")
    expect(frame.locator("section[aria-labelledby=host]")).to_contain_text("production serves")
    picture(page, "page-failed")
    page.goto(f"{url(stand)}/dags/{DAG_ID}/runs/{run}/tasks/extract/mapped")
    expect(page.get_by_text("shard 0000").first).to_be_visible()
    picture(page, "grid-failed")

    # from the page to the shard's task, and there the button that Airflow has for it
    frame = hidden_states(page, stand, run)
    frame.locator("a.cell.failed").first.click()
    page.wait_for_url(f"**/tasks/extract/mapped/{failed[0].map_index}")
    page.get_by_role("button", name=re.compile("Clear", re.I)).first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog).to_be_visible()
    # Downstream is chosen already: more than the shard, its setups and restore, verify and handoff too
    expect(dialog.get_by_text(re.compile(r"Affected Tasks: 1\d"))).to_be_visible()
    picture(dialog, "clear-shard")
    dialog.get_by_role("button", name=re.compile("Confirm|Clear", re.I)).last.click()
    expect(dialog).to_be_hidden()


def test_the_second_try_ends_green_and_the_page_shows_what_became(
    page: Page, desk: BrowserContext, browser: Browser, stand: Stack, client: AirflowClient
) -> None:
    assert stand.airflow is not None
    run = RUNS["real"]
    assert client.watch(DAG_ID, run, timeout_s=RUN_TIMEOUT_S) == "success"
    frame = hidden_states(page, stand, run)
    expect(frame.locator("a.cell.done")).to_have_count(6)
    expect(frame.locator("a.cell.again").first).to_be_visible()
    server = json.loads((stand.host_dir / "hsx" / "state" / "server.json").read_text())
    assert server["mode"] == "production"  # the cleared shard borrowed the host itself, and gave it back
    expect(frame.locator("section[aria-labelledby=host]")).to_contain_text(f"pid {server['pid']}")
    expect(frame.locator("#bench-chart-0")).to_be_visible()
    expect(frame.locator("section[aria-labelledby=datasets]")).to_contain_text("handed off")
    expect(frame.locator("section[aria-labelledby=datasets]")).to_contain_text("by next token")
    expect(frame.locator("section[aria-labelledby=failures]")).to_contain_text("of shard")  # what was, stays told
    picture(page, "page-after")
    whole(desk, stand, "page-after-whole", run)
    context = logged_in(browser, stand.airflow.url, stand.airflow.password, theme="dark")
    whole(context, stand, "page-after-whole-dark", run)
    context.close()
    page.goto(f"{url(stand)}/dags/{DAG_ID}/runs/{run}/tasks/extract/mapped")
    expect(page.get_by_text("shard 0000").first).to_be_visible()
    picture(page, "grid-rerun")


def test_the_next_dry_run_knows_how_long_it_would_take(page: Page, stand: Stack, client: AirflowClient) -> None:
    conf: dict[str, Any] = {"dry_run": True, "dataset": str(stand.work.parent / "more.jsonl")}
    write_samples(stand.work.parent / "more.jsonl", samples=240, shortest=100, longest=1399, seed=8)
    run = client.trigger(DAG_ID, conf)
    assert client.watch(DAG_ID, run, timeout_s=RUN_TIMEOUT_S) == "success"
    frame = hidden_states(page, stand, run)
    expect(frame.get_by_text(re.compile(r"Extraction would take .* at the measured [\d,]+ tokens/s"))).to_be_visible()
    expect(frame.get_by_text(re.compile("Production would be down for about"))).to_be_visible()
    picture(page, "dry-run")
