"""Fleet's control plane and instance runners over plain HTTP.

The SDK hides status codes, Retry-After and the structure of errors, which decide what happens next;
and it retries by itself, below whoever counts attempts.
"""

import asyncio
import random
import reprlib
import time
import uuid
from collections.abc import Mapping
from typing import Any, cast

import aiohttp

from services.env_gateway.adapters.fleet import wire as fleet_wire
from services.env_gateway.adapters.fleet.errors import FleetError, classified
from services.env_gateway.adapters.http_client import HttpError, send
from services.env_gateway.adapters.supervised_server import Address
from services.env_gateway.config.backends import FLEET_URL, FleetConfig
from services.env_gateway.ports import BackendError, Provision
from services.env_gateway.tools.retry_policy import Backoff

# The client whose wire this is: what Fleet answers may depend on it.
_SDK = {"x-fleet-sdk-language": "Python", "x-fleet-sdk-version": "0.2.133"}
_RUNNER_SDK = {"x-fleet-sdk-language": "Python", "x-fleet-sdk-version": "1.0.0"}
_JSON = {"content-type": "application/json"}
_POLL_BASE_S, _POLL_CAP_S = 0.1, 2.0
_MAX_WAIT_S = 3600
# Fleet answers a creation that it could not finish rather than let the request time out.
_WAIT_SHARE = 0.9
_TOKEN_AGE_S = 1.0
_ENDED = ("stopped", "error")


class FleetApi:
    """Raises BackendError from every call; `FleetError` for what Fleet answered."""

    def __init__(
        self,
        config: FleetConfig,
        address: Address,
        http: aiohttp.ClientSession,
        headers: Mapping[str, str],
    ) -> None:
        """`headers` carry the API key."""
        self.http = http
        self.headers = headers
        self.limits = config.answers
        self._config = config
        self._address = address
        self._token = RunnerToken(self)
        # A creation that failed at Fleet is asked for anew under another request id.
        self._tries: dict[str, int] = {}

    async def control(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: Any = None,
        request_id: str | None = None,
        base: str | None = None,
    ) -> Any:
        """`path` below the control plane's address, or below `base`."""
        until = _now() + timeout_s
        base = base or await self._address.url(timeout_s)
        headers = {
            **self.headers,
            **_SDK,
            **(_JSON if body is not None else {}),
            "x-request-id": request_id or uuid.uuid4().hex,
            "x-request-timestamp": str(int(time.time() * 1000)),
        }
        try:
            answer, _ = await send(
                self.http,
                method,
                base + path,
                timeout_s=_left(until),
                limits=self.limits,
                body=body,
                headers=headers,
            )
        except HttpError as error:
            raise classified(error) from error
        return answer

    async def runner(self, method: str, url: str, *, timeout_s: float, body: Any = None) -> Any:
        """A request to an instance's own runner, which the API key is not for."""
        until = _now() + timeout_s
        headers = {**_RUNNER_SDK, **(_JSON if body is not None else {})}
        for attempt in range(2):
            token = await self._token.get(_left(until))
            gate = {"x-runner-token": token} if token else {}
            try:
                answer, _ = await send(
                    self.http,
                    method,
                    url,
                    timeout_s=_left(until),
                    limits=self.limits,
                    body=body,
                    headers={**headers, **gate},
                )
            except HttpError as error:
                # A gated router says 404 to whoever brings no token, or one of yesterday.
                gated = error.status == 404 and not attempt
                if not gated or not await self._token.renewed(token, _left(until)):
                    raise classified(error) from error
            else:
                return answer
        raise AssertionError("the second attempt returns or raises")

    async def create(
        self, request: Provision, *, image_type: str | None, timeout_s: float
    ) -> dict[str, Any]:
        """A running instance's description. Repeated, it finds the instance of the first time."""
        until = _now() + timeout_s
        config = self._config
        optional = {"region": config.region, "image_type": config.image_type or image_type}
        body = {
            **fleet_wire.creation(request),
            **{name: value for name, value in optional.items() if value},
            "heartbeat_interval": config.heartbeat_interval_s,
            "max_wait_seconds": min(_MAX_WAIT_S, max(1, int(timeout_s * _WAIT_SHARE))),
        }
        tries = self._tries.get(request.episode_id, 0)
        created = await self._created(
            body, f"{request.episode_id}-{tries}" if tries else request.episode_id, timeout_s
        )
        running = await self._running(created, until)
        if running is None:
            self._tries[request.episode_id] = tries + 1
            message = f"Fleet could not start instance {created['instance_id']}"
            raise BackendError("create_failed", message, delivered=False)
        self._tries.pop(request.episode_id, None)
        return running

    async def ended(self, instance_id: str, timeout_s: float) -> str | None:
        """Why an instance is gone; None when it runs. Raises BackendError when nobody can say."""
        try:
            body = await self._instance(instance_id, timeout_s)
        except FleetError as error:
            if error.status != 404:
                raise
            return f"Fleet has no instance {instance_id}"
        if body.get("status") not in _ENDED:
            return None
        why = body.get("termination_reason")
        return f"instance {instance_id} has {body['status']}" + (f" ({why})" if why else "")

    async def heartbeat(self, instance_id: str, region: str | None, *, timeout_s: float) -> None:
        path = f"{fleet_wire.instance_path(instance_id)}/heartbeat"
        body = {"region": region} if region else {}
        await self.control("POST", path, timeout_s=timeout_s, body=body)

    async def delete(self, instance_id: str, *, timeout_s: float) -> None:
        path = fleet_wire.instance_path(instance_id)
        try:
            await self.control("DELETE", path, timeout_s=timeout_s)
        except FleetError as error:
            if error.status != 404:
                raise

    async def delete_run(self, run_id: str, *, timeout_s: float) -> None:
        """Delete all instances with this tag. Raises BackendError while any is left."""
        until = _now() + timeout_s
        query = fleet_wire.run_query(run_id)
        self._tries.pop(run_id, None)
        await self.control(
            "DELETE", f"{fleet_wire.INSTANCES}/batch?{query}", timeout_s=_left(until)
        )
        listed = await self.control(
            "GET", f"{fleet_wire.INSTANCES}?{query}", timeout_s=_left(until)
        )
        left = [item for item in listed or () if item.get("status") not in _ENDED]
        if left:
            message = f"{len(left)} instances of {run_id} still run"
            raise BackendError("still_running", message, delivered=True)

    async def _created(
        self, body: Mapping[str, Any], request_id: str, timeout_s: float
    ) -> dict[str, Any]:
        region, base = self._config.region, None
        if region and self._config.fixed_url == FLEET_URL:
            base = f"https://{region}.fleetai.com"
        try:
            answer = await self.control(
                "POST",
                fleet_wire.INSTANCES,
                timeout_s=timeout_s,
                body=body,
                request_id=request_id,
                base=base,
            )
        except FleetError as error:
            known = fleet_wire.duplicate_of(error.body) if error.status == 409 else None
            if known is None:
                raise
            return {"instance_id": known}
        return _described(answer)

    async def _running(self, body: dict[str, Any], until: float) -> dict[str, Any] | None:
        """Wait until the instance runs; None when it has ended instead."""
        backoff = Backoff(base_s=_POLL_BASE_S, cap_s=_POLL_CAP_S, rng=random.Random())
        instance_id = body["instance_id"]
        while body.get("status") != "running" or not body.get("urls"):
            if body.get("status") in _ENDED:
                return None
            if "status" in body:
                wait_s = backoff.next()
                if _now() + wait_s >= until:
                    message = f"instance {instance_id} is still {body['status']}"
                    raise BackendError("timeout", message, delivered=None)
                await asyncio.sleep(wait_s)
            body = await self._instance(instance_id, _left(until))
        return body

    async def _instance(self, instance_id: str, timeout_s: float) -> dict[str, Any]:
        path = fleet_wire.instance_path(instance_id)
        return _described(await self.control("GET", path, timeout_s=timeout_s))


class RunnerToken:
    """What instance runners ask for where they are gated. Resolved on first use, and again when a
    runner refuses it; that there is no gate (404) is remembered as well."""

    def __init__(self, api: FleetApi) -> None:
        self._api = api
        self._token: str | None = None
        self._resolved_at: float | None = None
        self._resolving = asyncio.Lock()

    async def get(self, timeout_s: float) -> str | None:
        async with self._resolving:
            if self._resolved_at is None:
                await self._resolve(timeout_s)
            return self._token

    async def renewed(self, refused: str | None, timeout_s: float) -> bool:
        """Whether the token is another than the `refused` one by now. Asked for at most once in a
        while: a runner also says 404 for an instance that is gone."""
        async with self._resolving:
            at = self._resolved_at
            if self._token == refused and (at is None or _now() - at > _TOKEN_AGE_S):
                await self._resolve(timeout_s)
            return self._token != refused

    async def _resolve(self, timeout_s: float) -> None:
        try:
            answer = await self._api.control("GET", "/v1/runner-auth/token", timeout_s=timeout_s)
        except FleetError as error:
            if error.status != 404:
                raise
            answer = None
        token = _fields(answer).get("token")
        self._token = token.strip() or None if isinstance(token, str) else None
        self._resolved_at = _now()


def _described(answer: Any) -> dict[str, Any]:
    fields = _fields(answer)
    if not isinstance(fields.get("instance_id"), str) or "status" not in fields:
        message = f"Fleet described an instance as {reprlib.repr(answer)}"
        raise BackendError("protocol", message, delivered=None)
    return fields


def _fields(answer: Any) -> dict[str, Any]:
    return cast("dict[str, Any]", answer) if isinstance(answer, dict) else {}


def _left(until: float) -> float:
    return max(0.001, until - _now())


def _now() -> float:
    return asyncio.get_running_loop().time()
