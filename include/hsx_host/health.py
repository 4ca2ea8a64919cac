"""Whether a server serves: ``/health``, one real token, and a soak of small requests; and that it goes on evenly."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import requests

from hsx_host import envfile, servers
from hsx_host.contract import ServerSettings
from hsx_host.errors import HsxError, TryAgain
from hsx_host.progress import Progress, log

REQUEST_TIMEOUT_S = 60.0
_POLL_S = 0.5


def problem(settings: ServerSettings, timeout_s: float = REQUEST_TIMEOUT_S, *, was_ready: bool = False) -> str:
    """Why the server does not serve now; empty where it is healthy and has generated one real token.

    :param was_ready: it has been healthy before, so that the token alone proves that it still serves. SGLang's
        ``/health`` generates a token of its own and looks for it after a second.
    """
    try:
        if was_ready:
            return _generate(settings, [5, 6, 7, 8], timeout_s)
        with _session(settings) as session:
            answer = session.get(f"{servers.url(settings)}/health", timeout=timeout_s)
        if answer.status_code != 200:
            return f"/health answers {answer.status_code}"
        return _generate(settings, [5, 6, 7, 8], timeout_s)
    except requests.ConnectionError:
        return "nobody answers on its port"
    except requests.RequestException as e:
        return f"{type(e).__name__}: {e}"


def wait_until_ready(
    settings: ServerSettings,
    *,
    alive: Callable[[], bool],
    log_file: str,
    deadline_s: float,
    what: str,
    was_ready: bool = False,
) -> float:
    """Wait for the first real token; gives the seconds it took. ``was_ready``: see ``problem``.

    A warm-up that answers 503 is waited out, until ``deadline_s``. A server that dies ends the wait at once; the last
    lines of its log stand in the error (TryAgain).
    """
    began = time.monotonic()
    said, why = 0.0, ""
    while True:
        if not alive():
            raise TryAgain(
                f"the {what} server ended before it was ready; the end of its log:\n{_end(log_file, settings)}",
                field="server log",
                value=log_file,
                fix="read the log; start again once the cause is gone",
            )
        left = deadline_s - (time.monotonic() - began)
        if left <= 0:
            raise TryAgain(
                f"the {what} server is not ready after {deadline_s:.0f} s ({why}); the end of its log:\n"
                f"{_end(log_file, settings)}",
                field=f"{what}.start_timeout_s",
                value=settings.start_timeout_s,
                fix="read the log; raise start_timeout_s where it only needs longer",
            )
        why = problem(settings, timeout_s=min(REQUEST_TIMEOUT_S, max(left, 1.0)), was_ready=was_ready)
        spent = time.monotonic() - began
        if not why:
            return spent
        if spent - said >= 10:
            said = spent
            log(f"{what} server: {spent:.0f} s, not ready yet ({why[:120]})")
        time.sleep(_POLL_S)


def soak(settings: ServerSettings, what: str) -> None:
    """``soak_requests`` small different requests, eight at once: a server may be healthy and still hang later on.

    TryAgain on the first that fails.
    """
    total = settings.soak_requests
    if total <= 0:
        return
    progress = Progress(f"soak {what}", total)

    def one(i: int) -> str:
        try:
            return _generate(settings, [5 + (i * 31 + j * 7) % 480 for j in range(16)], REQUEST_TIMEOUT_S)
        except requests.RequestException as e:
            return f"{type(e).__name__}: {e}"

    pool = ThreadPoolExecutor(max_workers=min(8, total))
    try:
        for done, why in enumerate(pool.map(one, range(total)), start=1):
            if why:
                raise TryAgain(
                    f"the {what} server answers /health, but request {done} of {total} of the soak failed: {why}",
                    field="soak_requests",
                    value=total,
                    fix="read the server's log",
                )
            progress.update(done)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # the rest of a soak that failed is not waited for


def freeze_garbage(settings: ServerSettings, what: str) -> None:
    """Have a warm server leave all that it holds out of Python's full garbage collections (SGLang's ``/freeze_gc``).

    One looks at 600,000 objects, and its scheduler launches nothing for half a second. SGLang 0.5.23 does the same
    after its own warm-up. A server that does not do it is only slower.
    """
    try:
        with _session(settings) as session:
            answer = session.post(f"{servers.url(settings)}/freeze_gc", timeout=REQUEST_TIMEOUT_S)
        why = "" if answer.ok else f"/freeze_gc answers {answer.status_code}"
    except requests.RequestException as e:
        why = f"{type(e).__name__}: {e}"
    if why:
        log(f"the {what} server does not freeze its garbage collection: {why}")


def _session(settings: ServerSettings) -> requests.Session:
    """Straight to the server: a proxy in the environment is for elsewhere. With the server's key, where it has one."""
    session = requests.Session()
    session.trust_env = False
    session.headers.update(servers.headers(settings))
    return session


def _end(path: str, settings: ServerSettings) -> str:
    """The end of a server's log, for an error message that others read."""
    try:
        variables = envfile.variables(settings)
    except HsxError:  # the file is gone, or not its owner's alone any more
        variables = settings.env
    return servers.without_secrets(log_tail(path), settings, variables)


def log_tail(path: str, lines: int = 30) -> str:
    """The last lines of a log, each cut to 300 characters."""
    try:
        with Path(path).open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - 64 * 1024))
            text = f.read().decode(errors="replace")
    except OSError as e:
        return f"(no log: {e})"
    return "\n".join(line[:300] for line in text.splitlines()[-lines:])


def _generate(settings: ServerSettings, ids: list[int], timeout_s: float) -> str:
    """Ask for one token after ``ids`` (small ids: every vocabulary has them); empty where it came, else why not."""
    body = {"input_ids": ids, "sampling_params": {"max_new_tokens": 1, "temperature": 0}}
    with _session(settings) as session:
        answer = session.post(f"{servers.url(settings)}/generate", json=body, timeout=timeout_s)
    if answer.status_code != 200:
        return f"/generate answers {answer.status_code}: {answer.text[:200]}"
    try:
        tokens = answer.json()["meta_info"]["completion_tokens"]
    except (ValueError, KeyError, TypeError) as e:
        return f"/generate answers something else than a generation ({type(e).__name__}): {answer.text[:200]}"
    return "" if tokens >= 1 else "/generate gave no token"
