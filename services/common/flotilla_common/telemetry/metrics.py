"""Prometheus metrics of every service."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache

from prometheus_client import REGISTRY, Counter, Histogram, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.rpc.network_addresses import is_loopback, split_host_port

_SECONDS = (0.001, 0.005, 0.025, 0.1, 0.5, 2.5, 10.0, 60.0)

_handled = Counter(
    "flotilla_rpc_handled", "Calls that this process has answered", ["method", "code"]
)
_seconds = Histogram("flotilla_rpc_seconds", "Time to answer a call", ["method"], buckets=_SECONDS)


@cache
def rpc_observer(method: str) -> Callable[[str, float], None]:
    """Return a function (status code name, seconds) that counts one answered call of `method`.

    Looking up a labelled metric costs more than counting, hence one lookup per method and code."""
    seconds = _seconds.labels(method).observe

    @cache
    def handled(code: str) -> Callable[[], None]:
        return _handled.labels(method, code).inc

    def observe(code: str, elapsed_s: float) -> None:
        handled(code)()
        seconds(elapsed_s)

    return observe


Values = Mapping[tuple[str, ...], float]


class _FamilyCollector(Collector):
    """Collector of the families that each part of this process showed last."""

    def __init__(self) -> None:
        self._families: dict[str, Sequence[Metric]] = {}

    def show(self, part: str, families: Sequence[Metric]) -> None:
        """Replace the families that `part` of this process shows.

        Use it for numbers that the part counts anyway: hot paths then pay nothing for them."""
        # A single assignment, because scrapes come from another thread.
        self._families = {**self._families, part: families}

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        for families in self._families.values():
            yield from families


_shown = _FamilyCollector()
REGISTRY.register(_shown)
show = _shown.show


def counter(name: str, help: str, labels: Sequence[str], values: Values) -> Metric:
    """Return a family of totals since the start of the process, one for each tuple of label
    values."""
    return _fill_family(CounterMetricFamily(name, help, labels=labels), values)


def gauge(name: str, help: str, labels: Sequence[str], values: Values) -> Metric:
    """Return a family of current values."""
    return _fill_family(GaugeMetricFamily(name, help, labels=labels), values)


def _fill_family(family: CounterMetricFamily | GaugeMetricFamily, values: Values) -> Metric:
    for labels, value in values.items():
        family.add_metric(labels, value)
    return family


def seconds_histogram(name: str, help: str, *labels: str) -> Callable[..., Callable[[float], None]]:
    """Register a histogram of seconds.

    The result takes label values and returns the function that observes seconds."""
    histogram = Histogram(name, help, labels, buckets=_SECONDS)

    @cache
    def observer(*values: str) -> Callable[[float], None]:
        return histogram.labels(*values).observe if values else histogram.observe

    return observer


def event_counter(name: str, help: str, *labels: str) -> Callable[..., Callable[[], None]]:
    """Register a total of events.

    The result takes label values and returns the function that counts one more."""
    counter = Counter(name, help, labels)

    @cache
    def one_more(*values: str) -> Callable[[], None]:
        return counter.labels(*values).inc if values else counter.inc

    return one_more


def start_http(listen: str) -> str:
    """Serve /metrics from a separate thread; return the address. Raises ConfigError."""
    host, port = split_host_port(listen, "metrics")
    if not is_loopback(host):
        raise ConfigError(
            f"refusing to serve metrics on {listen}: they are plain text, for loopback only; use"
            " 127.0.0.1:0 and fetch them through an SSH tunnel"
        )
    try:
        server, _ = start_http_server(port, addr=host)
    except OSError as error:
        raise ConfigError(
            f"cannot serve metrics on {listen}: {error.strerror}; use port 0 for a free one"
        ) from error
    return f"{host}:{server.server_port}"
