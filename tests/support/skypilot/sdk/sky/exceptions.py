"""The exceptions that the launcher distinguishes, with the same parents as SkyPilot's."""

from types import SimpleNamespace
from typing import Any


class ResourcesUnavailableError(Exception):
    """No cloud has such a machine."""

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


class ClusterNotUpError(Exception):
    """A cluster cannot be asked: by its status, or for want of an address."""

    def __init__(self, message: str, cluster_status: Any = None) -> None:
        super().__init__(message)
        self.cluster_status = cluster_status


class RequestCancelled(Exception):
    """The request was cancelled."""


class RequestInterruptedError(Exception):
    """The server was restarted under the request."""


class ServerTemporarilyUnavailableError(Exception):
    """The server takes no requests at present."""


class FetchClusterInfoError(Exception):
    """A cloud does not return the address of a machine."""


class NetworkError(Exception):
    """A cloud was not reached."""


class ClusterStatusFetchingError(Exception):
    """A cloud does not return the status of a machine."""


class SkyletInternalError(Exception):
    """SkyPilot's own part of a machine has failed."""


class SkyletUnavailableError(Exception):
    """SkyPilot's own part of a machine does not answer."""


class CloudError(Exception):
    """Anything of a package that clients may lack."""

    def __init__(self, message: str, cloud_provider: str, error_type: str) -> None:
        super().__init__(f"{cloud_provider} error ({error_type}): {message}")


class ApiServerConnectionError(RuntimeError):
    """The server does not answer."""


_TYPES: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        *(CommandFailureException, ClusterSetUpError, ClusterDoesNotExist, RequestCancelled),
        *(ResourcesUnavailableError, ClusterNotUpError, ValueError),
        *(RuntimeError, TypeError, OSError),
        *(FetchClusterInfoError, NetworkError, ClusterStatusFetchingError),
        *(SkyletInternalError, SkyletUnavailableError),
    )
}


def of(error: dict[str, Any]) -> Exception:
    """Rebuild an exception reported by a server, with its traceback, as SkyPilot's client does."""
    if error["type"] == "RequestInterruptedError":
        # Nothing was raised: the server writes it down when it goes.
        return RequestInterruptedError(error["text"])
    package, _, kind = error["type"].rpartition(".")
    if package:
        # It loses where it was raised when it is wrapped.
        return CloudError(error["text"], package.partition(".")[0], kind)
    known = _TYPES.get(kind)
    if known is None:
        return Exception(f"{kind}: {error['text']}")
    found = known(error["text"])
    if kind == "ResourcesUnavailableError":
        found = ResourcesUnavailableError(error["text"], failover_history=[error["text"]])
    if kind == "ClusterNotUpError":
        found = ClusterNotUpError(error["text"], SimpleNamespace(value="UP"))
    found.stacktrace = "on the server"  # type: ignore[attr-defined]
    return found
