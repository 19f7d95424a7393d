"""The table of vocabularies in which policies and environments speak of a screen. Pure.

A vocabulary has one tool, `computer`, whose `verb_key` names the action, or a tool for each action.
Its verbs are rows: the name, the kind of action, what the name alone says of it, and arguments."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from flotilla_common.tasks.task_format import TaskError
from flotilla_env_gateway.tools.action_arguments import (
    Argument,
    ButtonArgument,
    ClicksArgument,
    DirectionArgument,
    EnterArgument,
    KeysArgument,
    PathArgument,
    PixelsArgument,
    PointArgument,
    SecondsArgument,
    TextArgument,
)
from flotilla_env_gateway.tools.screen_actions import Kind, ScreenAction, Units

VocabularyName = Literal["fleet", "cua", "anthropic", "openai"]
COMPUTER, DONE = "computer", "done"
_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Verb:
    """One name of a vocabulary. `says`: fields of the action that the name alone determines."""

    name: str
    kind: Kind
    arguments: tuple[Argument, ...] = ()
    says: Mapping[str, Any] = field(default_factory=dict)

    def read_action(self, arguments: Mapping[str, Any], units: Units) -> ScreenAction:
        """Return the action of a call with these arguments. Raises TaskError for a missing, an
        unknown or a wrong one."""
        known = {name for argument in self.arguments for name in argument.names}
        unknown = sorted(arguments.keys() - known)
        if unknown:
            takes = ", ".join(sorted(known)) or "nothing"
            raise TaskError(f"{self.name} takes {takes}, and not {unknown[0][:_SHOWN]!r}")
        fields = dict(self.says)
        for argument in self.arguments:
            if argument.is_given(arguments):
                fields |= argument.read(arguments, units)
            elif argument.required:
                raise TaskError(f"{self.name} needs {' and '.join(argument.names)}")
        return ScreenAction(self.kind, **fields)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """`units` are those of its points where the settings name no others: "pixels" of the screen, or
    thousandths of it. `verb_key` is empty where each verb is a tool."""

    name: VocabularyName
    verb_key: str
    verbs: tuple[Verb, ...]
    units: Literal["pixels", "relative1000"] = "pixels"

    def find_verb(self, tool: str, arguments: Mapping[str, Any]) -> Verb | None:
        """Return the verb of a call; None if the vocabulary has no such verb."""
        name = arguments.get(self.verb_key) if self.verb_key else tool
        return next((verb for verb in self.verbs if verb.name == name), None)

    def list_points(self) -> Iterator[PointArgument | PathArgument]:
        """Yield the arguments that are points, each once."""
        found = (a for verb in self.verbs for a in verb.arguments)
        yield from dict.fromkeys(a for a in found if isinstance(a, PointArgument | PathArgument))


_COORDINATE = PointArgument(("coordinate",), ("point",))
_AT = PointArgument(("coordinate",), ("point",), required=True)
_FROM = PointArgument(("start_coordinate",), ("start",), required=True)
_TEXT = TextArgument(("text",), ("text",), required=True)
_CHORD = KeysArgument(("text",), ("keys",), required=True)
_HELD = KeysArgument(("text",), ("held",))
_WHEEL = DirectionArgument(("scroll_direction", "scroll_amount"), ("scroll",), required=True)
_DURATION = SecondsArgument(("duration",), ("seconds",))
_DONE = Verb(DONE, "done")


def _clicks(*held: Argument) -> tuple[Verb, ...]:
    """Return the clicks that Fleet and Anthropic name alike."""
    at = (_COORDINATE, *held)
    return (
        Verb("left_click", "click", at),
        Verb("right_click", "click", at, {"button": "right"}),
        Verb("middle_click", "click", at, {"button": "middle"}),
        Verb("double_click", "click", at, {"clicks": 2}),
        Verb("triple_click", "click", at, {"clicks": 3}),
    )


_SCREEN_VERBS = (
    Verb("screenshot", "screenshot"),
    Verb("cursor_position", "cursor_position"),
    Verb("mouse_move", "move", (_AT,)),
    Verb("left_click_drag", "drag", (_FROM, _AT)),
    Verb("scroll", "scroll", (_COORDINATE, _WHEEL)),
    Verb("type", "type", (_TEXT,)),
    Verb("key", "keys", (_CHORD,)),
    Verb("wait", "wait", (_DURATION,)),
)
_X, _Y = "x", "y"
_XY = PointArgument((_X, _Y), ("point",), required=True)
_KEY = KeysArgument(("key",), ("keys",), required=True, dialect="browser")
_BUTTON = ButtonArgument(("button",), ("button",))

VOCABULARIES: Mapping[VocabularyName, Vocabulary] = {
    # The tool `computer` of Fleet's instances and leased browsers.
    "fleet": Vocabulary("fleet", "action", (*_SCREEN_VERBS, *_clicks(), _DONE)),
    # The tools of the MCP server in Fleet's SDK.
    "cua": Vocabulary(
        "cua",
        "",
        (
            Verb("computer_screenshot", "screenshot"),
            Verb(
                "mouse_click",
                "click",
                (_XY, _BUTTON, ClicksArgument(("repeats",), ("clicks",))),
            ),
            Verb("mouse_move", "move", (_XY,)),
            Verb("mouse_down", "press", (_BUTTON,)),
            Verb("mouse_up", "release", (_BUTTON,)),
            Verb(
                "mouse_drag",
                "drag",
                (
                    PointArgument(("x_start", "y_start"), ("start",), required=True),
                    PointArgument(("x_end", "y_end"), ("point",), required=True),
                    _BUTTON,
                ),
            ),
            Verb("mouse_scroll", "scroll", (PixelsArgument(("dx", "dy"), ("scroll",)),)),
            Verb(
                "type_text",
                "type",
                (
                    TextArgument(("input_text",), ("text",), required=True),
                    EnterArgument(("press_enter",), ("enter",)),
                ),
            ),
            Verb(
                "key_combination",
                "keys",
                (
                    KeysArgument(
                        ("keys_to_press",), ("keys",), True, dialect="browser", is_list=True
                    ),
                ),
            ),
            Verb("key_down", "key_down", (_KEY,)),
            Verb("key_up", "key_up", (_KEY,)),
            Verb("wait", "wait", (SecondsArgument(("seconds",), ("seconds",)),)),
            _DONE,
        ),
        units="relative1000",
    ),
    # Anthropic's computer tool, as of its version 20250124.
    "anthropic": Vocabulary(
        "anthropic",
        "action",
        (
            *_SCREEN_VERBS,
            *_clicks(_HELD),
            Verb("left_mouse_down", "press", (_COORDINATE,)),
            Verb("left_mouse_up", "release", (_COORDINATE,)),
            Verb("hold_key", "hold_keys", (_CHORD, _DURATION)),
            _DONE,
        ),
    ),
    # The actions of OpenAI's computer_call.
    "openai": Vocabulary(
        "openai",
        "type",
        (
            Verb("screenshot", "screenshot"),
            Verb("click", "click", (_XY, ButtonArgument(("button",), ("button",), middle="wheel"))),
            Verb("double_click", "click", (_XY,), {"clicks": 2}),
            Verb("move", "move", (_XY,)),
            Verb("drag", "drag", (PathArgument(("path",), ("start", "point"), required=True),)),
            Verb(
                "scroll",
                "scroll",
                (
                    PointArgument((_X, _Y), ("point",)),
                    PixelsArgument(("scroll_x", "scroll_y"), ("scroll",)),
                ),
            ),
            Verb("type", "type", (_TEXT,)),
            Verb(
                "keypress",
                "keys",
                (KeysArgument(("keys",), ("keys",), True, dialect="openai", is_list=True),),
            ),
            Verb("wait", "wait"),
            _DONE,
        ),
    ),
}

# What models were trained to point with, by a part of their name or type; the first that fits.
_FAMILIES: tuple[tuple[str, Literal["pixels", "relative1000"]], ...] = (
    ("qwen2-5-vl", "pixels"),
    ("qwen3-vl", "relative1000"),
)


def find_family_units(model: str) -> Literal["pixels", "relative1000"] | None:
    """Return how the family of a model points, by its name, its folder's, or its `model_type`; None
    for families that are not known to point in any units."""
    plain = model.lower().replace("_", "-").replace(".", "-")
    return next((units for part, units in _FAMILIES if part in plain), None)
