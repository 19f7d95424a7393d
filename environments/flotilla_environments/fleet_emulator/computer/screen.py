"""Effects of clicks and keys. Pure but for the tools, which a form's button calls."""

import json
from typing import Any

from flotilla_environments.api import ToolError
from flotilla_environments.fleet_emulator.computer.layout import Element, Form, lay_out_elements
from flotilla_environments.server.mcp_tools import Tools

_PARSED = {"integer", "number", "boolean", "array", "object"}


class Screen:
    """An app as a page: a button for every tool, and the form of the one that was chosen."""

    def __init__(self, title: str, tools: Tools) -> None:
        self._title = title
        self._tools = tools
        self._form: Form | None = None

    def list_elements(self) -> list[Element]:
        return lay_out_elements(self._title, self._tools.tools(), self._form)

    def click_at(self, x: int, y: int) -> None:
        hit = [
            e.target
            for e in self.list_elements()
            if e.target is not None and e.box.contains_point(x, y)
        ]
        kind, name = hit[-1] if hit else (None, "")
        if kind == "tool":
            self._open_form(name)
        elif self._form is not None and kind == "field":
            self._form.focus, self._form.selected = name, False
        elif self._form is not None and kind == "run":
            self._run_form(self._form)

    def type_text(self, text: str) -> None:
        """Type into the field that has the focus; without one the text is lost, as anywhere."""
        form = self._form
        if form is None or form.focus is None:
            return
        before = "" if form.selected else form.values[form.focus]
        form.values[form.focus] = before + text
        form.selected = False

    def press_key(self, key: str) -> None:
        """Handle Return, Tab, BackSpace and ctrl+a; other keys do nothing."""
        form = self._form
        if form is None:
            return
        name = key.lower()
        if name in ("return", "enter"):
            self._run_form(form)
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

    def scroll_lines(self, lines: int) -> None:
        if self._form is not None:
            self._form.scrolled = max(0, self._form.scrolled + lines)

    def _open_form(self, name: str) -> None:
        tool = next(tool for tool in self._tools.tools() if tool.name == name)
        names = list(tool.parameters["properties"])
        self._form = Form(tool, dict.fromkeys(names, ""), focus=names[0] if names else None)

    def _run_form(self, form: Form) -> None:
        form.scrolled = 0
        try:
            form.result = json.dumps(self._tools.call(form.tool.name, _parse_arguments(form)))
        except ToolError as error:
            form.result = f"Error: {error}"


def _parse_arguments(form: Form) -> dict[str, Any]:
    """Parse what was typed by the tool's schema; fields left empty are left out."""
    properties = form.tool.parameters["properties"]
    return {
        name: _parse_value(name, _json_types(properties[name]), typed)
        for name, typed in form.values.items()
        if typed
    }


def _json_types(schema: dict[str, Any]) -> set[str]:
    """Return the JSON types that a schema allows, null left out."""
    choices: list[dict[str, Any]] = schema.get("anyOf", [schema])
    kinds = [choice.get("type", "string") for choice in choices]
    flat = {kind for given in kinds for kind in (given if isinstance(given, list) else [given])}
    return flat - {"null"}


def _parse_value(name: str, kinds: set[str], typed: str) -> Any:
    if not kinds <= _PARSED:
        return typed
    try:
        return json.loads(typed)
    except ValueError as error:
        raise ToolError(f"{name} must be of type {' or '.join(sorted(kinds))}") from error
