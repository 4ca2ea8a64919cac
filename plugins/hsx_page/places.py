"""Where the page is, as a browser asks for it."""

from __future__ import annotations

from urllib.parse import quote, urlencode, urlsplit

TITLE = "Hidden states"
PREFIX = "/hsx"
ENTRY = f"{PREFIX}/"
ROUTE = "hidden-states"


def page(dag_id: str = "", run_id: str = "", base: str = "") -> str:
    """The page inside Airflow's frame, at one run.

    :param base: Airflow's ``api.base_url``; "" gives a path.
    """
    query = f"?{urlencode({'dag': dag_id, 'run': run_id})}" if run_id else ""
    root = urlsplit(base).path.rstrip("/")  # Airflow may live below a path; its frame is told the whole one
    return f"{base.rstrip('/')}/plugin/{ROUTE}{root}{ENTRY}{query}"


def task(dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> str:
    """A task instance in Airflow's own UI, below its root."""
    path = f"dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}/tasks/{quote(task_id, safe='')}"
    return f"{path}/mapped/{map_index}" if map_index >= 0 else path


def run(dag_id: str, run_id: str) -> str:
    """A DAG run in Airflow's own UI, below its root."""
    return f"dags/{quote(dag_id, safe='')}/runs/{quote(run_id, safe='')}"
