"""The optional token that guards the server."""

import hmac

from starlette import status
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose


class BearerToken:
    """Requires the token on every request but /health."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app = app
        self._token = token.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        guarded = scope["type"] in ("http", "websocket") and scope["path"] != "/health"
        if not guarded or self._has_token(scope):
            await self._app(scope, receive, send)
            return
        if scope["type"] == "websocket":
            await WebSocketClose(status.WS_1008_POLICY_VIOLATION)(scope, receive, send)
            return
        body = {"detail": "Invalid or missing token: send 'Authorization: Bearer TOKEN'"}
        await JSONResponse(body, 401)(scope, receive, send)

    def _has_token(self, scope: Scope) -> bool:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        bearer = headers.get(b"authorization", b"").removeprefix(b"Bearer ")
        # Fleet's clients send the runner its own header instead.
        runner = headers.get(b"x-runner-token", b"")
        return any(hmac.compare_digest(given, self._token) for given in (bearer, runner))
