"""A screen as its environment's tools take it: from an action to calls of them. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flotilla_common.tasks.task_format import TaskError
from flotilla_env_gateway.ports import Tool
from flotilla_env_gateway.tools.action_arguments import Argument
from flotilla_env_gateway.tools.action_vocabularies import (
    COMPUTER,
    VOCABULARIES,
    Verb,
    Vocabulary,
)
from flotilla_env_gateway.tools.screen_actions import LOOKS, ScreenAction, Units

# Times may be left out: an environment that takes none waits as long as it does.
_OPTIONAL = {"seconds"}
_CUA_SIGNS = ("computer_screenshot", "mouse_click")


@dataclass(frozen=True, slots=True)
class ScreenStep:
    """One call of an environment's tool. `looks`: it changes nothing."""

    tool: Tool
    arguments: Mapping[str, Any]
    looks: bool = False


def find_screen_tools(tools: Sequence[Tool]) -> Sequence[Tool]:
    """Return the tools that are a screen: `computer`, or else those of Fleet's CUA server."""
    alone = [tool for tool in tools if tool.name == COMPUTER]
    if alone or not {*_CUA_SIGNS} <= {tool.name for tool in tools}:
        return alone
    names = {verb.name for verb in VOCABULARIES["cua"].verbs}
    return [tool for tool in tools if tool.name in names]


def find_vocabulary(tools: Sequence[Tool]) -> Vocabulary:
    """Return the vocabulary of a screen's tools, by their names and properties."""
    if tools[0].name != COMPUTER:
        return VOCABULARIES["cua"]
    choices = _choices(_properties(tools[0]), "type")
    return VOCABULARIES["openai" if {"click", "keypress"} & {*choices} else "fleet"]


class SpokenScreen:
    """The actions of an environment's screen: the verbs of its vocabulary that its tools list, with
    the arguments that they declare. `units` are those of its points."""

    def __init__(self, vocabulary: Vocabulary, tools: Sequence[Tool], units: Units) -> None:
        self.vocabulary = vocabulary
        self.units = units
        self._tools = {tool.name: tool for tool in tools}
        self._verbs = {verb.name: tool for verb in vocabulary.verbs if (tool := self._find(verb))}

    def _find(self, verb: Verb) -> Tool | None:
        if not self.vocabulary.verb_key:
            return self._tools.get(verb.name)
        tool = self._tools[COMPUTER]
        listed = _choices(_properties(tool), self.vocabulary.verb_key)
        return tool if verb.name in listed or not listed else None

    def plan_steps(self, action: ScreenAction) -> tuple[ScreenStep, ...]:
        """Return the calls that do an action. Raises TaskError if none do."""
        steps = self.find_steps(action)
        if steps is None:
            said = ", ".join(f"{name} {getattr(action, name)}" for name in _told(action))
            kind = action.kind.replace("_", " ")
            raise TaskError(f"the environment's screen cannot do: {kind}{said and f' ({said})'}")
        return steps

    def find_steps(self, action: ScreenAction) -> tuple[ScreenStep, ...] | None:
        """Return the calls that do an action: one, or as few as those of simpler actions are."""
        for verb in self.vocabulary.verbs:
            if verb.name in self._verbs and (step := self._write_step(verb, action)):
                return (step,)
        ways: list[tuple[ScreenStep, ...]] = []
        for way in _simplify_action(action):
            parts = [self.find_steps(simpler) for simpler in way]
            if None not in parts:
                ways.append(tuple(step for part in parts if part for step in part))
        return min(ways, key=len, default=None)

    def _write_step(self, verb: Verb, action: ScreenAction) -> ScreenStep | None:
        """Return the call of a verb that does exactly this action, if it can."""
        if verb.kind != action.kind:
            return None
        if any(getattr(action, name) != value for name, value in verb.says.items()):
            return None
        tool = self._verbs[verb.name]
        declared = _properties(tool)
        key = self.vocabulary.verb_key
        arguments: dict[str, Any] = {key: verb.name} if key else {}
        untold = action.changed_fields() - {*verb.says} - _OPTIONAL
        for argument in verb.arguments:
            lacks = any(getattr(action, name) in (None, ()) for name in argument.fields)
            if (lacks and argument.required) or not argument.fits(action):
                return None
            told = not declared or {*argument.names} <= {*declared}
            if told and (not lacks or argument.fields == ("seconds",)):
                arguments |= argument.write(action, self.units)
                untold -= {*argument.fields}
        chosen = {name: _choices(declared, name) for name in arguments}
        known = all(arguments[name] in values for name, values in chosen.items() if values)
        return ScreenStep(tool, arguments, action.kind in LOOKS) if known and not untold else None

    def convert_points(self, arguments: Mapping[str, Any], units: Units) -> dict[str, Any]:
        """Return a call in this vocabulary with its points in this screen's units, of `units`.
        Raises TaskError."""
        converted = dict(arguments)
        for argument in self.vocabulary.list_points():
            if argument.is_given(arguments):
                converted |= self._convert(argument, arguments, units)
        return converted

    def _convert(self, argument: Argument, given: Mapping[str, Any], units: Units) -> Any:
        if len(argument.fields) == 1:
            fields = argument.read(given, units)
            return argument.write(ScreenAction("drag", **fields), self.units)
        # A path: every point of it.
        argument.read(given, units)
        name = argument.names[0]
        pairs = [units.find_point(name, point["x"], point["y"]) for point in given[name]]
        places = [self.units.place_point(pair) for pair in pairs]
        return {name: [{"x": x, "y": y} for x, y in places]}


def _simplify_action(action: ScreenAction) -> Iterator[Sequence[ScreenAction]]:
    """Yield ways to do an action by simpler ones."""
    right, down = action.scroll
    if right and down:
        yield [replace(action, scroll=(right, 0)), replace(action, scroll=(0, down), point=None)]
    if action.enter:
        yield [replace(action, enter=False), ScreenAction("keys", keys=("Return",))]
    if action.point and action.kind in ("scroll", "press", "release"):
        yield [ScreenAction("move", point=action.point), replace(action, point=None)]
    if action.kind == "drag":
        button = action.button
        yield [
            ScreenAction("move", point=action.start),
            ScreenAction("press", button=button),
            ScreenAction("move", point=action.point),
            ScreenAction("release", button=button),
        ]
    pressed = action.held or (action.keys if action.kind == "hold_keys" else ())
    if pressed:
        inner = ScreenAction("wait", seconds=action.seconds)
        inner = replace(action, held=()) if action.held else inner
        down_first = [ScreenAction("key_down", keys=(key,)) for key in pressed]
        yield [*down_first, inner, *(ScreenAction("key_up", keys=(k,)) for k in pressed[::-1])]


def _told(action: ScreenAction) -> Sequence[str]:
    points = {"point", "start", "text", "seconds"}
    return sorted(action.changed_fields() - points)


def _properties(tool: Tool) -> Mapping[str, Any]:
    """Return the properties of a tool's arguments; none if it takes any."""
    schema = json.loads(tool.input_schema_json)
    return (schema.get("properties") or {}) if isinstance(schema, dict) else {}


def _choices(properties: Mapping[str, Any], key: str) -> Sequence[Any]:
    """Return the values that a property may have, where its schema lists them."""
    schema = properties.get(key)
    if not isinstance(schema, dict):
        return ()
    found = schema.get("enum") or [each.get("const") for each in schema.get("oneOf") or ()]
    return [value for value in found if value is not None]
