"""The page's FastAPI app. Every route asks Airflow who is there, and shows a person only DAGs that they may read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Annotated, Any
from urllib.parse import urlencode

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import AssetDetails, DagAccessEntity, DagDetails
from airflow.api_fastapi.common.db.common import SessionDep
from airflow.api_fastapi.core_api.security import GetUserDep, get_user
from airflow.configuration import conf
from fastapi import Depends, FastAPI, HTTPException, Query, Request
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse, Response
from sqlalchemy.orm import Session

from hsx_page import places, reading
from hsx_page.datasets import datasets_of
from hsx_page.hosts import hosts_of
from hsx_page.unread import Unread, clean
from hsx_page.view import run_line, run_view

RUNS, HOST_RUNS, DATASETS = 20, 10, 200
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data:; "
        "connect-src 'self'; base-uri 'self'; frame-ancestors 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}


def make_app() -> FastAPI:
    """The app, to be mounted at ``places.PREFIX``."""
    app = FastAPI(title=places.TITLE, docs_url=None, redoc_url=None, openapi_url=None)
    app.add_api_route("/", _page, response_class=HTMLResponse)
    app.add_api_route("/static/{path:path}", _static, dependencies=[Depends(get_user)])
    app.add_api_route("/api/overview", _overview)
    app.add_exception_handler(404, _not_found)
    return app


async def _page(request: Request) -> Response:
    """The page itself; someone who isn't logged in is sent to Airflow's login, and comes back."""
    try:
        await get_user(request, None, None)
    except HTTPException:
        here = f"{request.url.path}?{request.url.query}" if request.url.query else request.url.path
        return RedirectResponse(f"{get_auth_manager().get_url_login()}?{urlencode({'next': here})}")
    return _file("index.html", cache="no-cache")


async def _static(path: str) -> Response:
    """The page's own scripts, styles and the vendored libraries."""
    return _file(path, cache="private, max-age=3600")


def _file(path: str, *, cache: str) -> Response:
    place = files("hsx_page") / "static"
    for part in path.split("/"):
        if part in ("", ".", ".."):
            raise HTTPException(404, "no such file")
        place = place / part
    kind = next((kind for suffix, kind in _TYPES.items() if path.endswith(suffix)), None)
    if kind is None or not place.is_file():
        raise HTTPException(404, "no such file")
    return Response(place.read_bytes(), media_type=kind, headers={**_HEADERS, "Cache-Control": cache})


def _overview(
    user: GetUserDep,
    session: SessionDep,
    dag: Annotated[str, Query(description="with run: the run to show")] = "",
    run: Annotated[str, Query(description="default: the one that goes on, else the last")] = "",
) -> JSONResponse:
    """All that the page shows, in one answer."""
    allowed = [name for name in reading.dags(session) if _may_read(user, name)]
    if dag and dag not in allowed:
        raise HTTPException(404, f"there is no DAG {dag} with the tag {reading.TAG} that you may read")
    body = overview(session, allowed, dag, run, assets=_may_read_assets(user))
    for dataset in body["datasets"]:
        dataset["consumers"] = [c for c in dataset["consumers"] if _may_read(user, c["dag_id"])]
    return JSONResponse(body, headers=_HEADERS)


def overview(session: Session, allowed: Sequence[str], dag: str, run: str, *, assets: bool) -> dict[str, Any]:
    """The page's document.

    :param allowed: DAGs that may be shown.
    :param dag, run: the run to show; "" the one that goes on, else the last.
    :param assets: whether data sets may be shown.
    """
    now, unread = time.time(), Unread()
    recent = reading.runs(session, allowed, RUNS)
    chosen = reading.run(session, dag, run) if run else next((r for r in recent if r.state == "running"), None)
    if run and chosen is None:
        raise HTTPException(404, f"there is no run {run} of {dag}")
    chosen = chosen or (recent[0] if recent else None)
    looked = reading.looked(session, allowed, HOST_RUNS)
    facts = reading.run_facts(session, [*recent, *(r for r in looked if r not in recent)])
    handed = reading.handoffs(session, allowed, DATASETS) if assets else []
    shown = None if chosen is None else _run(session, chosen, now, unread)
    seen, contacts = reading.sightings(session, looked), reading.contacts(session, looked)
    verified, consumers = reading.verified(session, handed), reading.consumers(session, handed)
    document = {
        "now": now,
        "dags": list(allowed),
        "base": conf.get("api", "base_url", fallback="").rstrip("/"),
        "runs": [run_line(r, facts.get((r.dag_id, r.run_id), {}), unread) for r in recent],
        "run": shown,
        "hosts": unread.part("the hosts", [], hosts_of, seen, facts, contacts, unread),
        "datasets": unread.part(
            "the data sets", [], datasets_of, handed, recent, facts, verified, consumers, shown, unread
        )
        if assets
        else [],
    }
    found: dict[str, Any] = clean({**document, "unread": unread.said()})
    return found


def _run(session: Session, run: reading.Run, now: float, unread: Unread) -> Mapping[str, Any]:
    tasks = reading.tasks(session, run.dag_id, run.run_id)
    facts = reading.run_facts(session, [run], ("run", "plan", "shards")).get((run.dag_id, run.run_id), {})
    told = reading.told(session, run.dag_id, run.run_id)
    order: list[str] = unread.part(f"the order of {run.dag_id}", [], reading.order, session, run.dag_id)
    bare = run_view(run, [], {}, {}, [], now)
    return unread.part(f"the run {run.run_id}", bare, run_view, run, tasks, facts, told, order, now, unread)


def _may_read(user: Any, dag_id: str) -> bool:
    """Task instances and XComs of the DAG: what the page shows comes from there."""
    wanted = (None, DagAccessEntity.TASK_INSTANCE, DagAccessEntity.XCOM)
    return all(
        get_auth_manager().is_authorized_dag(
            method="GET", access_entity=entity, details=DagDetails(id=dag_id), user=user
        )
        for entity in wanted
    )


def _may_read_assets(user: Any) -> bool:
    return bool(get_auth_manager().is_authorized_asset(method="GET", details=AssetDetails(), user=user))


async def _not_found(request: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": getattr(error, "detail", "not found")}, status_code=404, headers=_HEADERS)
