"""Grades the tasks of this folder by the state that they end in, or by their final answer.

What a task expects stands in its `metadata`:

- `state`: calls of tools that only read, each with the `lines` that it has to answer, in any order.
  A line is a list of texts between which anything without spaces may stand, such as a time. None in
  place of the lines: the call has to fail.
- `answer`: the final answer, without the spaces and the stop around it, in any case.

A change of this file takes effect once its digest is listed anew:
`sha256sum verifier.py > verifiers.sha256`.
"""

import ast
import contextlib
import json
import re
from typing import Any


def verify(env: Any, final_answer: str | None = None, metadata: Any = None) -> dict[str, Any]:
    """Return the score, 1 or 0, and the checks that passed and failed."""
    passed: list[str] = []
    failed: list[str] = []
    for probe in metadata.get("state", ()):
        check = f"{probe['tool']} {json.dumps(probe['arguments'])} answers as expected"
        (passed if answers_as(probe["lines"], read_lines(env, probe)) else failed).append(check)
    if "answer" in metadata:
        is_right = plain(final_answer or "") == plain(metadata["answer"])
        (passed if is_right else failed).append("the final answer is as expected")
    return {"score": int(bool(passed) and not failed), "passed": passed, "failed": failed}


def read_lines(env: Any, probe: dict[str, Any]) -> list[str] | None:
    """Return what a tool answers now; None if it answers with an error."""
    try:
        return lines_of(env.call_tool(probe["tool"], **probe["arguments"]))
    except Exception as error:
        # The class of what tools answer has no name here. All else is a failure of the grade.
        if type(error).__name__ != "ToolError":
            raise
        return None


def lines_of(answer: Any) -> list[str]:
    """Return the lines of an answer. JSON, and lists and dicts as Python prints them, are one line,
    their lists in one order."""
    if isinstance(answer, str) and answer[:1] in ("[", "{", "("):
        with contextlib.suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            answer = ast.literal_eval(answer)
    if isinstance(answer, str):
        return [line.rstrip() for line in answer.splitlines() if line.strip()]
    return [write_json(answer)]


def answers_as(expected: list[list[str]] | None, lines: list[str] | None) -> bool:
    """Return True if these are the lines that are expected, in whichever order."""
    if expected is None or lines is None:
        return expected is lines
    left = list(lines)
    # The exact ones first, so that one with gaps takes none of theirs.
    for texts in sorted(expected, key=len):
        pattern = re.compile(r"\S+".join(re.escape(text) for text in texts))
        found = next((line for line in left if pattern.fullmatch(line)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def write_json(value: Any) -> str:
    return json.dumps(in_order(value), sort_keys=True, ensure_ascii=False, default=repr)


def in_order(value: Any) -> Any:
    """Return a JSON value with its lists sorted by all but long numbers, times and hashes."""
    if isinstance(value, dict):
        return {str(key): in_order(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return sorted((in_order(each) for each in value), key=_rank)
    return value


def _rank(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, default=repr)
    return re.sub(r"[0-9a-f-]{7,}|\d[\d:.TZ+-]{4,}", "", text)


def plain(text: str) -> str:
    return " ".join(text.split()).strip(" .\"'`").casefold()
