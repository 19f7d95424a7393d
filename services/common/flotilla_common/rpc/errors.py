"""One error for every service, the same on both sides of the wire."""

from collections.abc import Mapping

import grpc

# Of refusals by this package, not by a service.
DOMAIN = "common.flotilla"


class ServiceError(Exception):
    """A refusal that the caller can act on, by its `code` and `reason`.

    `reason` is an UPPER_SNAKE_CASE word listed in the contract of the service named by `domain`;
    `metadata` holds the facts that a program needs to act on it. `retry_delay_s` is how long the
    caller should wait before it retries. All of it travels to the caller, so nothing in it may be
    secret.
    """

    def __init__(
        self,
        code: grpc.StatusCode,
        reason: str,
        message: str,
        *,
        domain: str,
        metadata: Mapping[str, str] | None = None,
        retry_delay_s: float | None = None,
    ) -> None:
        super().__init__(f"{reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.domain = domain
        self.metadata: Mapping[str, str] = dict(metadata or {})
        self.retry_delay_s = retry_delay_s


def make_refusal(code: grpc.StatusCode, reason: str, message: str) -> ServiceError:
    """Return a refusal by the common plumbing, not by a service."""
    return ServiceError(code, reason, message, domain=DOMAIN)


class ConfigError(ValueError):
    """A mistake in the configuration; the message names the file, the key and the fix."""
