"""Structured logs: JSON lines with run id and step, without secrets, bounded in length."""

import json
import logging
import os
import sys
from collections.abc import Mapping
from typing import Any

import structlog

from flotilla_common.text.printable_text import json_line, make_visible
from flotilla_common.text.redaction import add_secret, clean_value, secret_values

MAX_LINE_BYTES = 16 * 1024
# For our own lines and those of libraries.
_SHARED: list[structlog.typing.Processor] = [
    structlog.stdlib.filter_by_level,
    structlog.contextvars.merge_contextvars,
    structlog.stdlib.add_logger_name,
    structlog.processors.add_log_level,
    structlog.processors.TimeStamper(fmt="iso", utc=True),
    structlog.processors.StackInfoRenderer(),
    structlog.processors.format_exc_info,
]

_everywhere: dict[str, object] = {}


def setup(
    service: str, run_id: str, *, replica: int = 0, pretty: bool | None = None, level: str = "INFO"
) -> None:
    """Send the logs of this process, those of libraries included, to stderr.

    Lines are JSON, or key=value if stderr is a terminal (`pretty` overrides this). Values of
    environment variables with secret-like names never appear.
    """
    for value in secret_values(os.environ):
        add_secret(value)
    identity = {"service": service, "replica": replica, "run_id": run_id}
    render = format_event if (sys.stderr.isatty() if pretty is None else pretty) else _event_to_json
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            # Lines of libraries are already filtered by level.
            foreign_pre_chain=_SHARED[1:],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                lambda _logger, _method, event: {**identity, **_everywhere, **event},
                lambda _logger, _method, event: render(
                    {key: clean_value(key, value) for key, value in event.items()}
                ),
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    structlog.configure(
        processors=[*_SHARED, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )


def get_logger(name: str) -> structlog.stdlib.BoundLogger:
    """Return a logger whose lines name `name` (a module) as their origin."""
    return structlog.stdlib.get_logger(name)


def bind(**values: object) -> None:
    """Put `values` (step, group_id, ...) on every line that this task and its children log."""
    structlog.contextvars.bind_contextvars(**values)


def bind_process(**values: object) -> None:
    """Put `values` on every line of this process from now on, in any task."""
    _everywhere.update(values)


def _event_to_json(event: Mapping[str, Any]) -> str:
    line = json_line(event, default=repr)
    size = len(line.encode(errors="replace"))
    if size <= MAX_LINE_BYTES:
        return line
    kept = {key: value for key, value in event.items() if len(repr(value)) <= 256}
    kept["event"] = str(event.get("event", ""))[:1024]
    kept["cut_bytes"] = size
    cut = json.dumps(dict(list(kept.items())[-32:]), ensure_ascii=True)
    # At up to 12 bytes a character the line may still be too long.
    last = {"event": kept["event"], "cut_bytes": size}
    return cut if len(cut) <= MAX_LINE_BYTES else json.dumps(last, ensure_ascii=True)


def format_event(event: Mapping[str, Any]) -> str:
    """Format an event for people: time, level, event, and key=value pairs."""
    rest = dict(event)
    head = [str(rest.pop(key, "")) for key in ("timestamp", "level", "event")]
    trace = rest.pop("exception", None)
    pairs = [f"{key}={value}" for key, value in rest.items() if key not in ("run_id", "logger")]
    line = " ".join([head[0][11:19], f"{head[1]:7}", head[2], *pairs])[:MAX_LINE_BYTES]
    line = make_visible(line, lines=False)
    return f"{line}\n{make_visible(str(trace))}" if trace else line
