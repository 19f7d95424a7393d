"""One trace per trajectory, across services: W3C trace context in call metadata.

The context always travels; spans are recorded only with FLOTILLA_TRACE=1, as JSON lines under
`traces/` in the run's folder.
"""

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from opentelemetry import context, trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SpanExporter
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

HEADER = "traceparent"
ENABLED_BY = "FLOTILLA_TRACE"

_propagator = TraceContextTextMapPropagator()
_tracer = trace.get_tracer("flotilla")
_recording = False
_NOTHING = nullcontext()


def setup(service: str, run_id: str, folder: Path) -> TracerProvider | None:
    """Record spans into `folder` if the environment enables it; else return None.

    The provider's `shutdown()` writes what is still buffered.
    """
    if os.environ.get(ENABLED_BY) != "1":
        return None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{service}-{os.getpid()}.jsonl"
    resource = Resource.create({"service.name": service, "flotilla.run_id": run_id})
    global _recording
    _recording = True
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(_make_exporter(path)))
    trace.set_tracer_provider(provider)
    return provider


def current_traceparent() -> str | None:
    """Return the traceparent header of the current span, if there is one."""
    if not trace.get_current_span().get_span_context().is_valid:
        return None
    carrier: dict[str, str] = {}
    _propagator.inject(carrier)
    return carrier.get(HEADER)


def continue_from(traceparent: str) -> None:
    """Make the caller's span the parent of all later spans of the current task.

    This cannot be undone, which suits a task that serves one call.
    """
    context.attach(_propagator.extract({HEADER: traceparent}))


def span(
    name: str, attributes: Mapping[str, str | int | float] | None = None
) -> AbstractContextManager[object]:
    """Return a span around a block. It costs some 30 microseconds, or almost nothing if recording
    is off."""
    if not _recording:
        return _NOTHING
    return _tracer.start_as_current_span(name, attributes=attributes)


def annotate(attributes: Mapping[str, str | int | float]) -> None:
    """Add attributes to the current span, if it is recorded."""
    if _recording:
        trace.get_current_span().set_attributes(attributes)


def _make_exporter(path: Path) -> SpanExporter:
    """Return an exporter of finished spans to a file, one JSON object per line."""
    file = path.open("a", encoding="utf-8")
    return ConsoleSpanExporter(out=file, formatter=lambda span: f"{span.to_json(indent=None)}\n")
