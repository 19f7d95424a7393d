"""Access to the inspector's pages: by the link's token, then by a cookie, at names of this machine.

Trajectories are hostile text: pages run only our own scripts, load nothing from elsewhere and
cannot be framed."""

import hmac
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from urllib.parse import urlencode

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from flotilla_reading.analysis.documents import STYLE_DIGEST

# The style of an analysis is in its page, which is one file.
CONTENT_POLICY = (
    f"default-src 'none'; style-src 'self' '{STYLE_DIGEST}'; script-src 'self';"
    " img-src 'self' data:; connect-src 'self'; frame-src 'self'; frame-ancestors 'self';"
    " base-uri 'none'; form-action 'self'"
)
_HEADERS = {
    "Content-Security-Policy": CONTENT_POLICY,
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


@dataclass(frozen=True, slots=True)
class Access:
    """Access rules: the token, and the host names that a browser may use for this server; None for
    a socket that no browser can reach directly."""

    token: str
    hosts: frozenset[str] | None

    @property
    def cookie(self) -> str:
        """Name of the cookie. Ports share cookies, so each server has its own."""
        return f"flotilla_inspector_{hmac.new(self.token.encode(), b'', 'sha256').hexdigest()[:12]}"

    def is_known(self, shown: str | None) -> bool:
        return shown is not None and hmac.compare_digest(shown.encode(), self.token.encode())


class Guard:
    """Admits requests that use a known name, change nothing and carry the token."""

    def __init__(self, app: ASGIApp, access: Access, refuse: Callable[[int], Response]) -> None:
        self._app = app
        self._access = access
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        answer = self._judge(scope)
        await (answer or self._app)(scope, receive, _with_headers(send))

    def _judge(self, scope: Scope) -> Response | None:
        """Return the response to a request that must not reach a page yet."""
        if scope["type"] == "websocket":
            return Response(status_code=403)
        request, access = Request(scope), self._access
        if access.hosts is not None and request.headers.get("host", "") not in access.hosts:
            return self._refuse(421)
        if request.method not in ("GET", "HEAD"):
            return Response("Only GET is served here.\n", 405, {"Allow": "GET, HEAD"})
        if request.url.path.startswith("/static/"):
            return None
        if access.is_known(shown := request.query_params.get("token")):
            return _to_page(request, access, shown or "")
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if access.is_known(request.cookies.get(access.cookie)) or access.is_known(bearer):
            return None
        return self._refuse(401)


def new_token() -> str:
    """Make a token for one start of the inspector."""
    return secrets.token_urlsafe(24)


def _to_page(request: Request, access: Access, token: str) -> Response:
    """Store the token in a cookie, and redirect to the same page without it."""
    others = [(k, v) for k, v in request.query_params.multi_items() if k != "token"]
    query = f"?{urlencode(others)}" if others else ""
    # A path of ours only: "//host" would lead elsewhere.
    where = "/" + request.url.path.lstrip("/") + query
    answer = RedirectResponse(where, 303)
    answer.set_cookie(access.cookie, token, httponly=True, samesite="strict")
    return answer


def _with_headers(send: Send) -> Send:
    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.update(_HEADERS)
        await send(message)

    return send_with_headers
