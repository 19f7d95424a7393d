"""A model by script behind a real HTTP server that speaks chat completions."""

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from threading import Lock
from typing import Any

from tests.support.http_answers import Answer, serve_answers

MODEL = "scripted"
# The model's next message for a conversation, or an answer of the server itself.
Say = Callable[[Sequence[Mapping[str, Any]]], Mapping[str, Any] | Answer]


@dataclass(slots=True)
class Asked:
    """What the server was asked for: bodies of completions, and headers of all requests."""

    bodies: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    headers: list[dict[str, str]] = field(default_factory=list[dict[str, str]])


def call(name: str, arguments: str, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call-{number}", "type": "function", "function": function}


def completion(message: Mapping[str, Any], finish: str = "stop") -> dict[str, Any]:
    """Return a completion with the null fields that real servers send."""
    whole = {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], **message}
    return {"choices": [{"index": 0, "message": whole, "finish_reason": finish}]}


def as_answer(value: object, status: int = 200, **headers: str) -> Answer:
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    return status, named, json.dumps(value).encode()


@contextmanager
def serve_model(say: Say) -> Generator[tuple[str, Asked]]:
    """Serve a model; yield its URL and what it was asked. `say` is called by one at a time."""
    asked, lock = Asked(), Lock()

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        body = request.rfile.read(int(request.headers.get("content-length") or 0))
        with lock:
            asked.headers.append({k.lower(): v for k, v in request.headers.items()})
            if request.command == "GET":
                return as_answer({"data": [{"id": MODEL}, {"id": "other"}]})
            asked.bodies.append(json.loads(body))
            said = say(asked.bodies[-1]["messages"])
        return said if isinstance(said, tuple) else as_answer(completion(said))

    with serve_answers(answer) as address:
        yield f"{address}/v1", asked
