"""What a click and a key do. Pure but for the tools, which a form's button calls."""

import json
from typing import Any

from environments.api import ToolError
from environments.fleet_emulator.computer.layout import Element, Form, elements
from environments.server.tools import Tools

_PARSED = {"integer", "number", "boolean", "array", "object"}


class Screen:
    """An app as a page: a button for every tool, and the form of the one that was chosen."""

    def __init__(self, title: str, tools: Tools) -> None:
        self._title = title
        self._tools = tools
        self._form: Form | None = None

    def elements(self) -> list[Element]:
        return elements(self._title, self._tools.tools(), self._form)

    def click(self, x: int, y: int) -> None:
        hit = [e.target for e in self.elements() if e.target is not None and e.box.holds(x, y)]
        kind, name = hit[-1] if hit else (None, "")
        if kind == "tool":
            self._open(name)
        elif self._form is not None and kind == "field":
            self._form.focus, self._form.selected = name, False
        elif self._form is not None and kind == "run":
            self._run(self._form)

    def type(self, text: str) -> None:
        """Into the field that has the focus; lost without one, as on any screen."""
        form = self._form
        if form is None or form.focus is None:
            return
        before = "" if form.selected else form.values[form.focus]
        form.values[form.focus] = before + text
        form.selected = False

    def press(self, key: str) -> None:
        """Return, Tab, BackSpace and ctrl+a do what they do; other keys nothing."""
        form = self._form
        if form is None:
            return
        name = key.lower()
        if name in ("return", "enter"):
            self._run(form)
        elif form.focus is None:
            return
        elif name == "tab":
            names = list(form.values)
            form.focus = names[(names.index(form.focus) + 1) % len(names)]
        elif name == "backspace":
            form.values[form.focus] = "" if form.selected else form.values[form.focus][:-1]
            form.selected = False
        elif name == "ctrl+a":
            form.selected = True

    def scroll(self, lines: int) -> None:
        if self._form is not None:
            self._form.scrolled = max(0, self._form.scrolled + lines)

    def _open(self, name: str) -> None:
        tool = next(tool for tool in self._tools.tools() if tool.name == name)
        names = list(tool.parameters["properties"])
        self._form = Form(tool, dict.fromkeys(names, ""), focus=names[0] if names else None)

    def _run(self, form: Form) -> None:
        form.scrolled = 0
        try:
            form.result = json.dumps(self._tools.call(form.tool.name, _arguments(form)))
        except ToolError as error:
            form.result = f"Error: {error}"


def _arguments(form: Form) -> dict[str, Any]:
    """What was typed, as the tool's schema has it; fields left empty are left out."""
    properties = form.tool.parameters["properties"]
    return {
        name: _value(name, _kinds(properties[name]), typed)
        for name, typed in form.values.items()
        if typed
    }


def _kinds(schema: dict[str, Any]) -> set[str]:
    """The JSON types that a schema allows, null left out."""
    choices: list[dict[str, Any]] = schema.get("anyOf", [schema])
    kinds = [choice.get("type", "string") for choice in choices]
    flat = {kind for given in kinds for kind in (given if isinstance(given, list) else [given])}
    return flat - {"null"}


def _value(name: str, kinds: set[str], typed: str) -> Any:
    if not kinds <= _PARSED:
        return typed
    try:
        return json.loads(typed)
    except ValueError as error:
        raise ToolError(f"{name} must be of type {' or '.join(sorted(kinds))}") from error
