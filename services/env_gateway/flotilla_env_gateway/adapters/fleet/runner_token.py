"""The token for Fleet's instance runners."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from flotilla_common.rpc.deadlines import loop_time
from flotilla_common.text.parsing import as_object
from flotilla_env_gateway.adapters.fleet.errors import NotFoundError

_TOKEN_AGE_S = 1.0


class RunnerToken:
    """The token for gated instance runners. It is fetched on first use, and again when a runner
    refuses it; the absence of a gate (404) is cached too."""

    def __init__(self, fetch: Callable[[float], Awaitable[Any]]) -> None:
        self._fetch_answer = fetch
        self._token: str | None = None
        self._resolved_at: float | None = None
        self._resolving = asyncio.Lock()

    async def get_token(self, timeout_s: float) -> str | None:
        async with self._resolving:
            if self._resolved_at is None:
                await self._resolve_token(timeout_s)
            return self._token

    async def renew_token(self, refused: str | None, timeout_s: float) -> bool:
        """Renew the token; return True if it now differs from the `refused` one. Queries to Fleet
        are rate-limited: a runner also answers 404 for an instance that is gone."""
        async with self._resolving:
            at = self._resolved_at
            if self._token == refused and (at is None or loop_time() - at > _TOKEN_AGE_S):
                await self._resolve_token(timeout_s)
            return self._token != refused

    async def _resolve_token(self, timeout_s: float) -> None:
        try:
            answer = await self._fetch_answer(timeout_s)
        except NotFoundError:
            answer = None
        token = as_object(answer).get("token")
        self._token = token.strip() or None if isinstance(token, str) else None
        self._resolved_at = loop_time()
