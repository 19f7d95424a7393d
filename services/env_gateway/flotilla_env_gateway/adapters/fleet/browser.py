"""Browsers leased from Fleet, for tasks whose policy sees an environment's web pages."""

import reprlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from flotilla_common.text.parsing import as_object
from flotilla_env_gateway.adapters.fleet.api import FleetApi
from flotilla_env_gateway.adapters.fleet.errors import NotFoundError
from flotilla_env_gateway.config.backends import FLEET_URL, FleetConfig
from flotilla_env_gateway.ports import BackendError

_FLEET_BROWSER_URL = "https://api.internal.fleet-platform.fleetai.com"
_PATH = "/v1/browser"
# Separates an instance's id from its browser's in the joined id that the gateway keeps.
_SEPARATOR = "~"


@dataclass(frozen=True, slots=True)
class BrowserLease:
    lease_id: str
    mcp_url: str


class BrowserClient:
    def __init__(self, api: FleetApi, config: FleetConfig) -> None:
        self._api = api
        self._hosts = config.browser_hosts
        # An emulator leases browsers at its own address.
        of_fleet = _FLEET_BROWSER_URL if config.fixed_url == FLEET_URL else None
        self._base = config.browser_url.rstrip("/") if config.browser_url else of_fleet

    async def lease_browser(
        self, episode_id: str, page_url: str, *, ttl_s: float, timeout_s: float
    ) -> BrowserLease:
        """Lease a browser that may reach the environment. The lease ends after `ttl_s`."""
        hosts = sorted({urlsplit(page_url).hostname or "", *self._hosts} - {""})
        answer = await self._api.call_control_plane(
            "POST",
            _PATH,
            timeout_s=timeout_s,
            body={"ttl_seconds": int(ttl_s) + 1, "allowed_hosts": hosts},
            request_id=f"{episode_id}-browser",
            base=self._base,
        )
        fields = as_object(answer)
        lease_id, mcp_url = fields.get("lease_id"), fields.get("mcp_url")
        if not isinstance(lease_id, str) or not isinstance(mcp_url, str):
            message = f"Fleet described a browser as {reprlib.repr(answer)}"
            raise BackendError("protocol", message, delivered=None)
        return BrowserLease(lease_id, mcp_url)

    async def release_browser(self, lease_id: str, *, timeout_s: float) -> None:
        path = f"{_PATH}/{quote(lease_id, safe='')}"
        with suppress(NotFoundError):
            await self._api.call_control_plane("DELETE", path, timeout_s=timeout_s, base=self._base)

    async def find_end_reason(self, lease_id: str, timeout_s: float) -> str | None:
        """Return why a browser is gone, or None while it runs. Raises BackendError if that is
        unknown."""
        path = f"{_PATH}/{quote(lease_id, safe='')}"
        try:
            await self._api.call_control_plane("GET", path, timeout_s=timeout_s, base=self._base)
        except NotFoundError:
            return f"Fleet has no browser {lease_id}"
        return None


def join_id(instance_id: str, lease: BrowserLease | None) -> str:
    """Join the ids of an instance and its browser into one for the gateway's journal."""
    return instance_id if lease is None else f"{instance_id}{_SEPARATOR}{lease.lease_id}"


def split_id(joined: str) -> Sequence[str]:
    """Split a joined id into the instance's id and its browser's lease, if there is one."""
    return joined.split(_SEPARATOR, 1)
