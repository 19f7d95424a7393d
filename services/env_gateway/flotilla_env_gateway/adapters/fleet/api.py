"""Fleet's control plane and instance runners over plain HTTP.

The SDK hides status codes, Retry-After and the structure of errors, which decide the next step;
and it retries internally, below the layer that counts attempts."""

import asyncio
import reprlib
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import aiohttp

from flotilla_common.rpc.deadlines import loop_time, seconds_left
from flotilla_common.text.parsing import as_object
from flotilla_env_gateway.adapters.fleet import wire as fleet_wire
from flotilla_env_gateway.adapters.fleet.errors import FleetError, NotFoundError, classify_error
from flotilla_env_gateway.adapters.fleet.runner_token import RunnerToken
from flotilla_env_gateway.adapters.http_client import HttpError, exchange_json
from flotilla_env_gateway.adapters.supervised_server import ServerAddress
from flotilla_env_gateway.config.backends import FLEET_URL, FleetConfig
from flotilla_env_gateway.limits.backoff import Backoff
from flotilla_env_gateway.ports import BackendError, ProvisionRequest

# The client whose wire this imitates: Fleet's answers may depend on it.
_SDK = {"x-fleet-sdk-language": "Python", "x-fleet-sdk-version": "0.2.133"}
_RUNNER_SDK = {"x-fleet-sdk-language": "Python", "x-fleet-sdk-version": "1.0.0"}
_POLL_BASE_S, _POLL_CAP_S = 0.1, 2.0
_MAX_WAIT_S = 3600
# Fleet answers an unfinished creation instead of letting the request time out.
_WAIT_SHARE = 0.9
_ENDED = ("stopped", "error")


class FleetApi:
    """Client of the control plane and of instance runners. Every call raises BackendError; for an
    error that Fleet answered, `FleetError`."""

    def __init__(
        self,
        config: FleetConfig,
        address: ServerAddress,
        http: aiohttp.ClientSession,
        headers: Mapping[str, str],
    ) -> None:
        """Keep the settings; `headers` carry the API key."""
        self.http = http
        self.headers = headers
        self.limits = config.answer_limits
        self._config = config
        self._address = address
        self._token = RunnerToken(self._fetch_runner_token)
        # A creation that failed at Fleet is requested again under another id.
        self._tries: dict[str, int] = {}

    async def call_control_plane(
        self,
        method: str,
        path: str,
        *,
        timeout_s: float,
        body: Any = None,
        request_id: str | None = None,
        base: str | None = None,
    ) -> Any:
        """Send a request to the control plane; `path` is below its address, or below `base`."""
        until = loop_time() + timeout_s
        base = base or await self._address.wait_for_root(timeout_s)
        headers = {
            **self.headers,
            **_SDK,
            "x-request-id": request_id or uuid.uuid4().hex,
            "x-request-timestamp": str(int(time.time() * 1000)),
        }
        try:
            answer, _ = await exchange_json(
                self.http,
                method,
                base + path,
                timeout_s=seconds_left(until),
                limits=self.limits,
                body=body,
                headers=headers,
            )
        except HttpError as error:
            raise classify_error(error) from error
        return answer

    async def call_runner(
        self, method: str, url: str, *, timeout_s: float, body: Any = None
    ) -> Any:
        """Send a request to an instance's own runner, for which the API key is not meant."""
        until = loop_time() + timeout_s
        for attempt in range(2):
            token = await self._token.get_token(seconds_left(until))
            gate = {"x-runner-token": token} if token else {}
            try:
                answer, _ = await exchange_json(
                    self.http,
                    method,
                    url,
                    timeout_s=seconds_left(until),
                    limits=self.limits,
                    body=body,
                    headers={**_RUNNER_SDK, **gate},
                )
            except HttpError as error:
                # A gated router answers 404 to a missing or outdated token.
                gated = error.status == 404 and not attempt
                if not gated or not await self._token.renew_token(token, seconds_left(until)):
                    raise classify_error(error) from error
            else:
                return answer
        raise AssertionError("the second attempt returns or raises")

    async def create_instance(
        self, request: ProvisionRequest, *, image_type: str | None, timeout_s: float
    ) -> dict[str, Any]:
        """Create an instance and return its description once it runs. A repeat finds the first
        instance."""
        until = loop_time() + timeout_s
        config = self._config
        optional = {"region": config.region, "image_type": config.image_type or image_type}
        body = {
            **fleet_wire.creation_body(request),
            **{name: value for name, value in optional.items() if value},
            "heartbeat_interval": config.heartbeat_interval_s,
            "max_wait_seconds": min(_MAX_WAIT_S, max(1, int(timeout_s * _WAIT_SHARE))),
        }
        tries = self._tries.get(request.episode_id, 0)
        created = await self._request_creation(
            body, f"{request.episode_id}-{tries}" if tries else request.episode_id, timeout_s
        )
        running = await self._wait_until_running(created, until)
        if running is None:
            self._tries[request.episode_id] = tries + 1
            message = f"Fleet could not start instance {created['instance_id']}"
            raise BackendError("create_failed", message, delivered=False)
        self._tries.pop(request.episode_id, None)
        return running

    async def find_end_reason(self, instance_id: str, timeout_s: float) -> str | None:
        """Return why an instance is gone, or None while it runs. Raises BackendError if that is
        unknown."""
        try:
            body = await self._get_instance(instance_id, timeout_s)
        except NotFoundError:
            return f"Fleet has no instance {instance_id}"
        if body.get("status") not in _ENDED:
            return None
        why = body.get("termination_reason")
        return f"instance {instance_id} has {body['status']}" + (f" ({why})" if why else "")

    async def send_heartbeat(
        self, instance_id: str, region: str | None, *, timeout_s: float
    ) -> None:
        path = f"{fleet_wire.instance_path(instance_id)}/heartbeat"
        body = {"region": region} if region else {}
        await self.call_control_plane("POST", path, timeout_s=timeout_s, body=body)

    async def delete_instance(self, instance_id: str, *, timeout_s: float) -> None:
        path = fleet_wire.instance_path(instance_id)
        with suppress(NotFoundError):
            await self.call_control_plane("DELETE", path, timeout_s=timeout_s)

    async def delete_run_instances(self, run_id: str, *, timeout_s: float) -> None:
        """Delete all instances with this tag. Raises BackendError while any is left."""
        until = loop_time() + timeout_s
        query = fleet_wire.run_query(run_id)
        self._tries.pop(run_id, None)
        await self.call_control_plane(
            "DELETE", f"{fleet_wire.INSTANCES}/batch?{query}", timeout_s=seconds_left(until)
        )
        listed = await self.call_control_plane(
            "GET", f"{fleet_wire.INSTANCES}?{query}", timeout_s=seconds_left(until)
        )
        left = [item for item in listed or () if item.get("status") not in _ENDED]
        if left:
            message = f"{len(left)} instances of {run_id} still run"
            raise BackendError("still_running", message, delivered=True)

    async def _request_creation(
        self, body: Mapping[str, Any], request_id: str, timeout_s: float
    ) -> dict[str, Any]:
        region, base = self._config.region, None
        if region and self._config.fixed_url == FLEET_URL:
            base = f"https://{region}.fleetai.com"
        try:
            answer = await self.call_control_plane(
                "POST",
                fleet_wire.INSTANCES,
                timeout_s=timeout_s,
                body=body,
                request_id=request_id,
                base=base,
            )
        except FleetError as error:
            known = fleet_wire.find_duplicate_id(error.body) if error.status == 409 else None
            if known is None:
                raise
            return {"instance_id": known}
        return _check_description(answer)

    async def _wait_until_running(
        self, body: dict[str, Any], until: float
    ) -> dict[str, Any] | None:
        """Wait until the instance runs; return None if it has ended instead."""
        backoff = Backoff(base_s=_POLL_BASE_S, cap_s=_POLL_CAP_S)
        instance_id = body["instance_id"]
        while body.get("status") != "running" or not body.get("urls"):
            if body.get("status") in _ENDED:
                return None
            if "status" in body:
                wait_s = backoff.next_wait_s()
                if loop_time() + wait_s >= until:
                    message = f"instance {instance_id} is still {body['status']}"
                    raise BackendError("timeout", message, delivered=None)
                await asyncio.sleep(wait_s)
            body = await self._get_instance(instance_id, seconds_left(until))
        return body

    async def _fetch_runner_token(self, timeout_s: float) -> Any:
        return await self.call_control_plane("GET", "/v1/runner-auth/token", timeout_s=timeout_s)

    async def _get_instance(self, instance_id: str, timeout_s: float) -> dict[str, Any]:
        path = fleet_wire.instance_path(instance_id)
        return _check_description(await self.call_control_plane("GET", path, timeout_s=timeout_s))


def _check_description(answer: Any) -> dict[str, Any]:
    fields = as_object(answer)
    if not isinstance(fields.get("instance_id"), str) or "status" not in fields:
        message = f"Fleet described an instance as {reprlib.repr(answer)}"
        raise BackendError("protocol", message, delivered=None)
    return fields
