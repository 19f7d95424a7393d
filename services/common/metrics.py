"""Prometheus metrics of every service."""

from collections.abc import Callable
from functools import cache

from prometheus_client import Counter, Histogram, start_http_server

from services.common.errors import ConfigError
from services.common.listen import check_listen

_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)

_handled = Counter(
    "flotilla_rpc_handled", "Calls that this process has answered", ["method", "code"]
)
_seconds = Histogram("flotilla_rpc_seconds", "Time to answer a call", ["method"], buckets=_SECONDS)


@cache
def rpc_observer(method: str) -> Callable[[str, float], None]:
    """A function (status code name, seconds) that counts one answered call of `method`.

    Looking up a labelled metric costs more than counting, hence one lookup per method and code.
    """
    seconds = _seconds.labels(method).observe

    @cache
    def handled(code: str) -> Callable[[], None]:
        return _handled.labels(method, code).inc

    def observe(code: str, elapsed_s: float) -> None:
        handled(code)()
        seconds(elapsed_s)

    return observe


def start_http(listen: str) -> str:
    """Serve /metrics from a thread of its own; returns the address. Raises ConfigError."""
    host, port = check_listen(listen)
    try:
        server, _ = start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {listen}: {error.strerror}; use port 0 for a free one"
        ) from error
    return f"{host}:{server.server_port}"
