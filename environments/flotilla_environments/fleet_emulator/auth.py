"""Access control: an API key for control plane and tools, a separate token for runners."""

import hmac
import re

from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from flotilla_environments.fleet_emulator.fault_injection import ADMIN
from flotilla_environments.fleet_emulator.faults import FaultPlan

_RUNNER = re.compile(r"/[^/]+/api/v1/env(/|$)")


class FleetAuth:
    """Check of API keys: any key is accepted, unless `key` sets one.

    The runner is open, like Fleet's without a gate; a set `runner_token` closes it, and then
    requests without the token get 404, as at Fleet.
    """

    def __init__(self, app: ASGIApp, plan: FaultPlan, key: str | None) -> None:
        self._app = app
        self._plan = plan
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._check_access(scope) if scope["type"] == "http" else None
        await (refusal or self._app)(scope, receive, send)

    def _check_access(self, scope: Scope) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        path: str = scope["path"]
        if path == "/health" or (path.startswith(ADMIN) and self._key is None):
            return None
        if _RUNNER.match(path):
            token = self._plan.runner_token
            if token is None or _matches_secret(headers.get(b"x-runner-token", b""), token):
                return None
            return JSONResponse({"detail": "Not Found"}, 404)
        if self._has_valid_key(headers):
            return None
        return JSONResponse({"detail": "Invalid or missing API key"}, 401)

    def _has_valid_key(self, headers: dict[bytes, bytes]) -> bool:
        given = headers.get(b"authorization", b"")
        if self._key is not None:
            return _matches_secret(given, f"Bearer {self._key}")
        login = b"x-jwt-token" in headers and b"x-team-id" in headers
        return login or len(given.removeprefix(b"Bearer ")) > 0


def _matches_secret(given: bytes, wanted: str) -> bool:
    return hmac.compare_digest(given, wanted.encode())
