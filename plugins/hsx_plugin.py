"""Registers the page "Hidden states", its place in the navigation, a link to it on every task of hsx, and what a run's
deadline is reckoned from.

Airflow loads this file in every component: it imports no web framework. The page itself is made on its first request.
"""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin

from hsx_operators.alerts import RunQueuedAt
from hsx_page.lazy import LazyPage
from hsx_page.links import PageLink
from hsx_page.places import ENTRY, PREFIX, ROUTE, TITLE


class HiddenStatesPlugin(AirflowPlugin):
    """The page lives at ``/hsx/``, behind Airflow's login; the navigation shows it in a frame."""

    name = "hsx"
    fastapi_apps = [{"app": LazyPage(), "url_prefix": PREFIX, "name": TITLE}]  # noqa: RUF012
    external_views: list[Any] = [  # noqa: RUF012
        {
            "name": TITLE,
            # Relative: resolved against Airflow's root, which may be a path.
            "href": ENTRY.removeprefix("/"),
            "destination": "nav",
            "url_route": ROUTE,
            "icon": f"{ENTRY.removeprefix('/')}static/icon.svg",
            "icon_dark_mode": f"{ENTRY.removeprefix('/')}static/icon-dark.svg",
        }
    ]
    operator_extra_links = [PageLink()]  # noqa: RUF012
    deadline_references = [RunQueuedAt]  # noqa: RUF012
