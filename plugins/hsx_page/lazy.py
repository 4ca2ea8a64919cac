"""The page as an ASGI app that costs nothing until someone asks for it: most components never do."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class LazyPage:
    """Makes ``hsx_page.web``'s FastAPI app on the first request."""

    def __init__(self) -> None:
        self._app: Any = None
        self._lock = threading.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Hand on to the app."""
        with self._lock:
            if self._app is None:
                from hsx_page.web import make_app

                self._app = make_app()
        await self._app(scope, receive, send)
