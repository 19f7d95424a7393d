"""A screen's tools as a policy is offered them, in the vocabulary and the units of its choice.
Pure."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flotilla_common.tasks.task_format import TaskError
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.action_vocabularies import COMPUTER, DONE, Verb, Vocabulary
from flotilla_env_gateway.tools.screen_actions import LOOKS, ScreenAction, Units
from flotilla_env_gateway.tools.spoken_screen import ScreenStep, SpokenScreen

_DONE_TOOL = Tool(DONE, "Ends the episode. Call it once, when you are done.", '{"type": "object"}')
_KINDS = {
    "screenshot": "shows the screen",
    "cursor_position": "tells where the pointer is",
    "move": "moves the pointer",
    "click": "clicks",
    "press": "presses a mouse button and keeps it down",
    "release": "releases a mouse button",
    "drag": "drags from the first point to the last one",
    "scroll": "turns the mouse wheel",
    "type": "types text",
    "keys": "presses keys together, such as ctrl+a or Return",
    "key_down": "presses a key and keeps it down",
    "key_up": "releases a key",
    "hold_keys": "holds keys down for some seconds",
    "wait": "waits",
    "done": "ends the episode; use it once, when you are done",
}
_EXAMPLES: Mapping[str, Any] = {"keys": ("a",), "text": "a", "scroll": (0, 1)}


@dataclass(frozen=True, slots=True)
class ScreenCall:
    """What a policy's call means: calls of the environment, or that the policy is done."""

    steps: Sequence[ScreenStep] = ()
    done: bool = False


def is_done(vocabulary: Vocabulary, name: str, arguments: Mapping[str, Any]) -> bool:
    return (arguments.get(vocabulary.verb_key) if vocabulary.verb_key else name) == DONE


class ForeignScreen:
    """The tools of a vocabulary that is not the environment's, as far as its screen can do what
    they say."""

    def __init__(self, vocabulary: Vocabulary, spoken: SpokenScreen, units: Units) -> None:
        self._vocabulary = vocabulary
        self._spoken = spoken
        self._units = units
        self.verbs = [verb for verb in vocabulary.verbs if self._is_possible(verb)]

    def list_tools(self, place: str) -> Sequence[Tool]:
        """Return the tools; `place` tells how coordinates are meant."""
        if not self._vocabulary.verb_key:
            return [self._describe_verb(verb, place) for verb in self.verbs]
        key, lines = self._vocabulary.verb_key, [f"- {v.name} {_say(v)}" for v in self.verbs]
        names: dict[str, Any] = {"type": "string", "enum": [verb.name for verb in self.verbs]}
        properties: dict[str, Any] = {key: names}
        for verb in self.verbs:
            properties |= self._describe_arguments(verb)
        schema = {"type": "object", "properties": properties, "required": [key]}
        text = "\n".join(("Uses the screen with mouse and keyboard. " + place, *lines))
        return [Tool(COMPUTER, text, json.dumps(schema))]

    def plan_call(self, name: str, arguments: Mapping[str, Any]) -> Sequence[ScreenStep]:
        """Return the environment's calls for one of the policy. Raises TaskError."""
        verb = self._vocabulary.find_verb(name, arguments)
        if verb is None or verb not in self.verbs:
            known = ", ".join(verb.name for verb in self.verbs)
            raise TaskError(f"{self._vocabulary.verb_key} must be one of: {known}")
        rest = {key: v for key, v in arguments.items() if key != self._vocabulary.verb_key}
        # What is null is left out, as some models write it.
        given = {key: value for key, value in rest.items() if value is not None}
        return self._spoken.plan_steps(verb.read_action(given, self._units))

    def _is_possible(self, verb: Verb) -> bool:
        """Return True if the environment can do the least that the verb may say."""
        if verb.kind == "done":
            return True
        fields = dict(verb.says)
        middle = self._units.find_point("", self._units.width // 2 or 0.5, 0)
        for argument in verb.arguments:
            for name in argument.fields:
                if name in ("point", "start"):
                    fields[name] = middle
                elif name in _EXAMPLES and (argument.required or name == "scroll"):
                    fields[name] = _EXAMPLES[name]
        return self._spoken.find_steps(ScreenAction(verb.kind, **fields)) is not None

    def _describe_verb(self, verb: Verb, place: str) -> Tool:
        needed = [n for argument in verb.arguments if argument.required for n in argument.names]
        schema = {"type": "object", "properties": self._describe_arguments(verb)}
        text = f"{_say(verb).capitalize()}."
        has_point = any({"point", "start"} & {*argument.fields} for argument in verb.arguments)
        return Tool(
            verb.name,
            f"{text} {place}" if has_point else text,
            json.dumps(schema | {"required": needed}),
            read_only=verb.kind in LOOKS,
        )

    def _describe_arguments(self, verb: Verb) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for argument in verb.arguments:
            found |= argument.describe(self._units)
        return found


def add_done(tools: Sequence[Tool], vocabulary: Vocabulary) -> Sequence[Tool]:
    """Return an environment's own tools with `done` among their actions, unless it is one."""
    key = vocabulary.verb_key
    if not key:
        known = any(tool.name == DONE for tool in tools)
        return tools if known else [*tools, _DONE_TOOL]
    schema = json.loads(tools[0].input_schema_json)
    try:
        names = schema["properties"][key]["enum"]
    except (KeyError, TypeError):
        return tools
    if not isinstance(names, list) or DONE in names:
        return tools
    names.append(DONE)
    return [replace(tools[0], input_schema_json=json.dumps(schema))]


def _say(verb: Verb) -> str:
    told = [f"the {verb.says['button']} button"] if "button" in verb.says else []
    told += [f"{verb.says['clicks']} times"] if "clicks" in verb.says else []
    return " ".join((_KINDS[verb.kind], *(f"with {t}" if "button" in t else t for t in told)))
