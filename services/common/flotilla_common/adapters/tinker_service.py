"""A Tinker service, hosted or our own, through Tinker's own client (`tinker` 0.38).

The client repeats calls by itself: for up to five minutes while a service cannot be reached or
answers 408, 409, 429 or 5xx, and for up to an hour while it answers 402. What it gives up is
classified here, so that a longer outage costs time and nothing else."""

import asyncio
import logging
import os
from enum import Enum
from types import MappingProxyType

import tinker
from tinker import types
from tinker._client import AsyncTinker
from tinker.lib.retryable_exception import RetryableException

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import TINKER_KEY, TinkerConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.redaction import redact

KEY_VARIABLE = TINKER_KEY

_log = get_logger(__name__)
_GONE = (404, 410)
_ANSWER_S = 10.0
_WAIT = (402, 408, 409, 425, 429)


class Trouble(Enum):
    """What a failure of a call asks for."""

    # The service cannot be reached, or refuses for now: the same call succeeds later.
    WAIT = "wait"
    # The session, model or sampler is no more: open it again, from what was saved.
    GONE = "gone"
    # The call is wrong, or not allowed: repeating it cannot help.
    REFUSED = "refused"


_KINDS = MappingProxyType(
    {
        types.RequestErrorCategory.User: Trouble.REFUSED,
        types.RequestErrorCategory.Server: Trouble.GONE,
        types.RequestErrorCategory.Unknown: Trouble.GONE,
    }
)


def classify(error: BaseException) -> Trouble:
    """Return what a failed call of the client asks for."""
    if isinstance(error, tinker.RequestFailedError):
        return _KINDS[error.category]
    if isinstance(error, tinker.APIStatusError):
        if error.status_code in _GONE:
            return Trouble.GONE
        passing = error.status_code in _WAIT or error.status_code >= 500
        return Trouble.WAIT if passing else Trouble.REFUSED
    if isinstance(error, tinker.APIConnectionError | RetryableException | TimeoutError | OSError):
        return Trouble.WAIT
    # The client's training client refuses all calls after a failed one, which is the cause.
    if isinstance(error, RuntimeError | ValueError) and error.__cause__ is not None:
        return classify(error.__cause__)
    return Trouble.REFUSED


def describe(error: BaseException) -> str:
    """Return a failure in words, with what to do about it where only the user can."""
    status = getattr(error, "status_code", None)
    text = redact(str(error) or type(error).__name__)
    if isinstance(error, tinker.APIConnectionError) and error.__cause__ is not None:
        # The client's own words name neither the address nor the cause.
        return redact(f"{text} {error.__cause__}".strip())
    if status in (401, 403):
        return f"the Tinker service refuses the key in {KEY_VARIABLE}: {text}"
    if status == 402:
        return f"the Tinker service has no credit left for the account of {KEY_VARIABLE}: {text}"
    return text


async def open_service(config: TinkerConfig, *, run_id: str) -> tinker.ServiceClient:
    """Return a client of the service; its first call opens a session, and blocks meanwhile. Raises
    ConfigError without a key.

    Example: `client = await open_service(policy.tinker, run_id=runtime.run_id)`."""
    if not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f'learner.engine = "tinker" needs {KEY_VARIABLE} in the environment: a key of the'
            " hosted service, or for `flotilla tinker-serve` the key that it printed"
        )
    _relay_logs()
    return await asyncio.to_thread(
        tinker.ServiceClient, {"flotilla_run": run_id}, display_name=run_id, base_url=config.url
    )


async def find_silence(config: TinkerConfig) -> str:
    """Return why the service does not answer now, asked by a request without a session; empty if
    it answers."""
    try:
        async with asyncio.timeout(_ANSWER_S):
            async with AsyncTinker(base_url=config.url, max_retries=0) as client:
                await client.service.health_check()
    except Exception as error:  # noqa: BLE001 - whatever the client raises, `classify` knows it
        return describe(error) if classify(error) is Trouble.WAIT else ""
    return ""


class _Relay(logging.Handler):
    """Passes warnings of the client on to the process's log: waits for capacity or credit."""

    def emit(self, record: logging.LogRecord) -> None:
        _log.warning("tinker client", said=redact(record.getMessage()))


def _relay_logs() -> None:
    logger = logging.getLogger("tinker")
    if not any(isinstance(handler, _Relay) for handler in logger.handlers):
        logger.addHandler(_Relay(logging.WARNING))
        logger.propagate = False
