"""Attempts played from scripts on a real app, graded by its verifier, as rows of dumps.

    # 12 done                              index of the task, and the reason for the attempt's end
    > find_item item={item}                a call; {name} is a slot or a target of the task
    ! tool_error 403: forbidden            what it was answered instead, with this outcome
    . I have ordered it. <done>            what the policy wrote; a line of its own is a turn

An end that is a failure of the environment (`env_lost a detail`) leaves the attempt without a grade
and without messages, as in a run."""

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flotilla_common.domain.attempts import FailureKind
from flotilla_environments.api import Instance, ToolError, open_instance
from flotilla_environments.local_verifier import run_verifier
from flotilla_environments.task_generator import make_data_id
from flotilla_environments.tasks import make_task
from tests.reading.analysis.episode_rows import Message, row

FOLDER = Path(__file__).with_name("episodes")


def play_scripts(name: str) -> Iterator[dict[str, Any]]:
    """Play the scripts of a file in order, `shop2` on the app `shop`; yield their rows."""
    app = name.rstrip("0123456789")
    for number, script in enumerate((FOLDER / f"{name}.txt").read_text().split("\n# ")[1:]):
        head, *lines = script.strip().splitlines()
        yield play_script(app, number, head, lines)


def play_script(app: str, number: int, head: str, lines: list[str]) -> dict[str, Any]:
    index, stop, *detail = head.split(maxsplit=2)
    with_facts = open_instance(app, make_data_id("train", int(index)))
    facts = {**with_facts.scenario.slots, **with_facts.scenario.targets}
    turns = list(_play_turns(with_facts, [line.format_map(facts) for line in lines]))
    task = make_task(app, "train", int(index))
    known: dict[str, Any] = {
        "env_key": app,
        "task_key": task["key"],
        "group_id": f"{app}{number:03d}",
    }
    counts = {"unknown_tools": _unknown_tools(turns)}
    if stop in (*FailureKind,):
        told: dict[str, Any] = {
            "failure": stop,
            "detail": "".join(detail),
            "no_grade": "".join(detail),
        }
        return row(reward=None, stop=stop, counts=counts, **known, **told)
    graded = run_verifier(task["verifier_func"], with_facts, "" if stop == "done" else None)
    found = row(turns, reward=float(graded.score), stop=stop, counts=counts, **known)
    found["messages"][0]["content"] = task["prompt"]
    return {**found, "checks_failed": graded.failed, "checks_passed": graded.passed}


def _play_turns(app: Instance, lines: list[str]) -> Iterator[Message]:
    for place, line in enumerate(lines):
        kind, _, text = line.partition(" ")
        following = lines[place + 1] if place + 1 < len(lines) else ""
        if kind == ".":
            yield {"role": "assistant", "content": text}
            if "<done>" not in text and following:
                yield _answer("", "", "no_call", "no tool call found")
        elif kind == ">":
            name, *pairs = shlex.split(text)
            arguments = {key: _value(value) for key, _, value in (p.partition("=") for p in pairs)}
            call = {"id": f"call-{place}", "type": "function"}
            function = {"name": name, "arguments": arguments}
            yield {
                "role": "assistant",
                "content": "",
                "tool_calls": [{**call, "function": function}],
            }
            yield _answer(call["id"], name, *_call_tool(app, name, arguments, following))


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def _call_tool(app: Instance, name: str, arguments: Any, following: str) -> tuple[str, str]:
    if following.startswith("! "):
        _, outcome, text = following.split(maxsplit=2)
        return outcome, text
    if name not in {tool.name for tool in app.tools()}:
        return "bad_tool", f"unknown tool {name!r}"
    try:
        return "ok", json.dumps(app.call(name, arguments))
    except ToolError as error:
        wrong = "argument" in str(error) or " must be " in str(error)
        return "bad_arguments" if wrong else "tool_error", str(error)


def _answer(call_id: str, name: str, outcome: str, text: str) -> Message:
    told = {"role": "tool", "tool_call_id": call_id, "name": name}
    if outcome == "ok":
        return {**told, "content": text}
    return {**told, "content": json.dumps({"error": text}), "outcome": outcome}


def _unknown_tools(turns: list[Message]) -> dict[str, int]:
    return {turn["name"]: 1 for turn in turns if turn.get("outcome") == "bad_tool"}
