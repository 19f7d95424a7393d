"""The form of a recorded run: a folder with a file of JSON lines for each episode, and every large
part once, by its SHA-256. Known secrets are hidden in both."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

from flotilla_common.domain.attempts import Grade, NoGradeReason, ToolOutcome
from flotilla_common.tasks.task_format import Task
from flotilla_common.text.redaction import redact, redact_bytes
from flotilla_env_gateway.ports import (
    CallAnswer,
    Media,
    Part,
    PolicyCall,
    Submission,
    Text,
    Tool,
)

# Below the run's directory.
FOLDER = "recording"
FORMAT_FILE, FORMAT = "format.json", b'{"flotilla_recording": 1}\n'
EPISODES, PARTS = "episodes", "parts"
# The first line of an episode, how it opened, its steps, and the last line. A file without the last
# one belongs to an episode that had not ended.
EPISODE, OPENED, UNOPENED = "episode", "opened", "unopened"
CALL, GRADE, TOOLS, LOST = "call", "grade", "tools", "lost"
END, CUT = "end", "cut"
_INLINE_BYTES = 4096

# Stores a part, and returns its hash; returns the part of a hash.
PutPart = Callable[[bytes], str]
GetPart = Callable[[str], bytes]
Fields = dict[str, Any]


def scrub(value: Any) -> Any:
    """Return a JSON value without known secrets."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        items = cast("Mapping[Any, Any]", value).items()
        return {redact(str(key)): scrub(item) for key, item in items}
    if isinstance(value, list | tuple):
        return [scrub(item) for item in cast("Sequence[Any]", value)]
    if isinstance(value, int | float) and redact(text := repr(value)) != text:
        return redact(text)
    return value


def identify_task(task: Task) -> Fields:
    """Return the fields of a task that decide what its environment is."""
    names = ("key", "env_key", "env_version", "data_key", "data_version", "modality", "servers")
    return scrub(
        {name: getattr(task, name) for name in names} | {"env_variables": task.raw_variables}
    )


def identify_call(call: PolicyCall) -> list[Any]:
    return [call.tool.name, scrub(call.arguments)]


def identify_grade(submission: Submission) -> Fields:
    """Return all that a grade depends on besides the calls before it. The verifier reads the
    conversation only where there is one."""
    task = submission.task
    # A verifier that names no metadata reads none.
    reads = task.metadata is not None and "metadata" in (task.verifier or "")
    return {
        "answer": scrub(submission.final_answer),
        "conversation": _digest(submission.conversation),
        "verifier": _digest(task.verifier),
        **({"metadata": _digest(as_key(task.metadata))} if reads else {}),
    }


def _digest(text: str | None) -> str | None:
    if text is None:
        return None
    return hashlib.sha256(redact(text).encode("utf-8", "surrogatepass")).hexdigest()


def as_key(value: Any) -> str:
    """Return the one text of a JSON value."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def encode_tools(tools: Sequence[Tool], put: PutPart) -> Any:
    text = json.dumps(scrub([asdict(tool) for tool in tools]))
    return {"at": put(text.encode())} if len(text) > _INLINE_BYTES else json.loads(text)


def decode_tools(value: Any, get: GetPart) -> tuple[Tool, ...]:
    listed = json.loads(get(value["at"])) if isinstance(value, dict) else value
    return tuple(Tool(**fields) for fields in listed)


def encode_parts(parts: Sequence[Part], put: PutPart) -> list[Fields]:
    return [_encode_part(part, put) for part in parts]


def _encode_part(part: Part, put: PutPart) -> Fields:
    if isinstance(part, Text):
        text = redact(part.text)
        if len(text) <= _INLINE_BYTES:
            return {"text": text}
        return {"text_at": put(text.encode("utf-8", "surrogatepass"))}
    size = {"width": part.width, "height": part.height}
    return {"media": put(redact_bytes(part.data)), "mime": redact(part.mime), **size}


def decode_parts(value: Sequence[Fields], get: GetPart) -> tuple[Part, ...]:
    return tuple(_decode_part(fields, get) for fields in value)


def _decode_part(fields: Fields, get: GetPart) -> Part:
    if "media" not in fields:
        stored = fields.get("text_at")
        text = get(stored).decode("utf-8", "surrogatepass") if stored else fields["text"]
        return Text(text)
    data = get(fields["media"])
    digest = hashlib.sha256(data).digest()
    size = (fields["width"], fields["height"])
    return Media(data, fields["mime"], digest, len(data), *size)


def encode_answer(answer: CallAnswer, put: PutPart) -> Fields:
    return {
        "outcome": answer.outcome.value,
        "parts": encode_parts(answer.parts, put),
        "reward": answer.reward,
        "done": answer.done,
    }


def decode_answer(value: Fields, get: GetPart) -> CallAnswer:
    outcome, parts = ToolOutcome(value["outcome"]), decode_parts(value["parts"], get)
    return CallAnswer(outcome, parts, value["reward"], value["done"], attempts=1)


def encode_grade(grade: Grade) -> Fields:
    return scrub(asdict(grade))


def decode_grade(value: Fields) -> Grade:
    changed: Fields = {name: tuple(value[name]) for name in ("checks_passed", "checks_failed")}
    changed["reason"] = value["reason"] and NoGradeReason(value["reason"])
    return Grade(**{**value, **changed})
