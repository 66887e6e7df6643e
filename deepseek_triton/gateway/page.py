"""The chat page at /: three static files of the package, and headers that keep it to itself."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import FastAPI
from fastapi.responses import Response

_FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/page.css": ("page.css", "text/css; charset=utf-8"),
    "/page.js": ("page.js", "text/javascript; charset=utf-8"),
}
# Nothing from elsewhere, no inline script: text of a model that became markup could do nothing.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_page(app: FastAPI) -> None:
    """Add the page's routes to `app`; they are not part of the API's description."""
    folder = resources.files("deepseek_triton.gateway") / "static"
    for path, (name, media_type) in _FILES.items():
        show = _shower((folder / name).read_bytes(), media_type)
        app.add_api_route(path, show, methods=["GET", "HEAD"], include_in_schema=False)


def _shower(content: bytes, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def show() -> Response:
        return Response(content, media_type=media_type, headers=_HEADERS)

    return show
