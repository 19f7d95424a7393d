"""The exceptions that the launcher tells apart, with the same parents as SkyPilot's."""

from typing import Any


class ResourcesUnavailableError(Exception):
    """Nobody has such a machine."""

    def __init__(
        self, message: str, no_failover: bool = False, failover_history: list[Any] | None = None
    ) -> None:
        super().__init__(message)
        self.no_failover = no_failover
        self.failover_history = failover_history or []


class CommandFailureException(Exception):
    """A command on a machine has failed."""


class ClusterSetUpError(Exception):
    """A machine could not be set up."""


class ClusterDoesNotExist(ValueError):
    """There is no such cluster."""


class RequestCancelled(Exception):
    """The request was cancelled."""


class ApiServerConnectionError(RuntimeError):
    """Nobody answers."""


_TYPES: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        *(CommandFailureException, ClusterSetUpError, ClusterDoesNotExist, RequestCancelled),
        *(ResourcesUnavailableError, ValueError),
        *(RuntimeError, TypeError),
    )
}


def of(error: dict[str, Any]) -> Exception:
    """The exception that a server has told of, with where it was raised, as SkyPilot's says it."""
    known = _TYPES.get(error["type"])
    if known is None:
        return Exception(f"{error['type']}: {error['text']}")
    found = known(error["text"])
    if error["type"] == "ResourcesUnavailableError":
        found = ResourcesUnavailableError(error["text"], failover_history=[error["text"]])
    found.stacktrace = "on the server"  # type: ignore[attr-defined]
    return found
