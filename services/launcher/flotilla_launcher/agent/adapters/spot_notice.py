"""Preemption notices of a spot machine, as its cloud gives them."""

import re
import time
from collections.abc import Mapping
from datetime import datetime

import httpx

from flotilla_common.adapters.bounded_http import ask, object_of
from flotilla_common.telemetry import log

# AWS states the time; GCP leaves 30 seconds, less the time of the poll.
_GCP_LEFT_S = 25.0
# The server is on the machine itself.
_TIMEOUT_S = 2.0
_TOKEN = re.compile(r"[!-~]{1,1024}")
_AWS_TOKEN_S = 300
_log = log.get_logger(__name__)


class MetadataNotices:
    """Preemption notices from the metadata servers of AWS and GCP, either of which may be present.
    Any other server gives no notice."""

    def __init__(self, url: str) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=_TIMEOUT_S, trust_env=False)

    async def poll_notice(self) -> float | None:
        """Poll AWS, then GCP. See `agent.ports.PollNotice`."""
        try:
            left = await self._poll_aws()
            return left if left is not None else await self._poll_gcp()
        except httpx.HTTPError as error:
            _log.debug("the metadata server does not answer", error=repr(error))
            return None

    async def close(self) -> None:
        await self._client.aclose()

    async def _poll_aws(self) -> float | None:
        headers = await self._fetch_aws_token()
        answer = await self._request("GET", "/latest/meta-data/spot/instance-action", headers)
        if not answer.is_success:
            return None
        try:
            at = datetime.fromisoformat((await object_of(answer))["time"]).timestamp()
        except (ValueError, KeyError, TypeError, OverflowError):
            _log.warning("AWS gives a notice that cannot be read", text=answer.text[:200])
            return None
        return max(0.0, at - time.time())

    async def _fetch_aws_token(self) -> dict[str, str]:
        """Fetch the IMDSv2 token. Where IMDSv2 is off, or this is not AWS, none is needed."""
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_AWS_TOKEN_S)}
        answer = await self._request("PUT", "/latest/api/token", headers)
        if not answer.is_success or not _TOKEN.fullmatch(answer.text):
            return {}
        return {"X-aws-ec2-metadata-token": answer.text}

    async def _poll_gcp(self) -> float | None:
        headers = {"Metadata-Flavor": "Google"}
        answer = await self._request("GET", "/computeMetadata/v1/instance/preempted", headers)
        preempted = answer.is_success and answer.text.strip() == "TRUE"
        return _GCP_LEFT_S if preempted else None

    async def _request(self, method: str, path: str, headers: Mapping[str, str]) -> httpx.Response:
        return await ask(self._client, method, path, headers=headers, whole_s=_TIMEOUT_S)
