"""The tool itself: its schema, and its actions on a screen."""

import base64
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from flotilla_environments.api import Picture, ToolError, ToolSpec
from flotilla_environments.fleet_emulator.computer.draw import draw_screen
from flotilla_environments.fleet_emulator.computer.layout import HEIGHT, WIDTH
from flotilla_environments.fleet_emulator.computer.screen import Screen
from flotilla_environments.server.mcp_tools import Tools

COMPUTER = "computer"
_CLICKS = ("left_click", "double_click", "mouse_move")
# Of the newest actions.
_LOGGED = 1000
Pictures = Literal["image", "json", "null"]


class Action(BaseModel):
    """Arguments of a call."""

    model_config = ConfigDict(extra="forbid", strict=True)

    action: Literal[
        "screenshot",
        "left_click",
        "double_click",
        "mouse_move",
        "cursor_position",
        "type",
        "key",
        "scroll",
        "wait",
        "navigate",
    ]
    coordinate: list[int] | None = Field(None, min_length=2, max_length=2, description="[x, y]")
    text: str | None = Field(None, description="what to type, or the key to press: Return, Tab")
    scroll_direction: Literal["up", "down"] = "down"
    scroll_amount: int = Field(3, ge=0, le=100, description="lines")
    url: str | None = Field(None, description="page that a browser opens by `navigate`")


class Computer:
    """A screen with its pointer. `pictures` is how the answers hold them; see `Faults`. `log` has
    the newest actions that were performed, as they were asked for."""

    def __init__(self, screen: Screen, pictures: Callable[[], Pictures]) -> None:
        self.screen = screen
        self._pictures = pictures
        self._pointer = (WIDTH // 2, HEIGHT // 2)
        self.log: deque[dict[str, Any]] = deque(maxlen=_LOGGED)

    def tools(self) -> list[ToolSpec]:
        description = (
            f"Use the app's {WIDTH}x{HEIGHT} screen with mouse and keyboard. Every action but "
            "cursor_position answers with a screenshot."
        )
        schema = Action.model_json_schema()
        return [ToolSpec(COMPUTER, description, schema, read_only=False, idempotent=False)]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        try:
            action = Action.model_validate(arguments)
        except ValidationError as error:
            first = error.errors()[0]
            raise ToolError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
        if action.action != "cursor_position":
            self.perform_action(action)
        self.log.append(action.model_dump(exclude_unset=True))
        if action.action == "cursor_position":
            return "X={},Y={}".format(*self._pointer)
        return self._take_screenshot()

    def perform_action(self, action: Action) -> None:
        """Perform an action. Raises `ToolError` for what the action lacks, and for `navigate`."""
        if action.action in _CLICKS:
            self._use_pointer(action)
        elif action.action in ("type", "key"):
            if action.text is None:
                raise ToolError(f"{action.action} needs text")
            write = self.screen.type_text if action.action == "type" else self.screen.press_key
            write(action.text)
        elif action.action == "scroll":
            up = action.scroll_direction == "up"
            self.screen.scroll_lines(-action.scroll_amount if up else action.scroll_amount)
        elif action.action == "navigate":
            raise ToolError("only a leased browser can navigate")

    def _use_pointer(self, action: Action) -> None:
        if action.coordinate is None:
            raise ToolError(f"{action.action} needs coordinate")
        x, y = action.coordinate
        if not (0 <= x < WIDTH and 0 <= y < HEIGHT):
            raise ToolError(f"[{x}, {y}] is not on the {WIDTH}x{HEIGHT} screen")
        self._pointer = (x, y)
        if action.action != "mouse_move":
            self.screen.click_at(x, y)

    def _take_screenshot(self) -> Any:
        how = self._pictures()
        if how == "null":
            return {"base64_image": None}
        png = draw_screen(self.screen.list_elements(), self._pointer)
        if how == "image":
            return Picture(png)
        return {"base64_image": f"data:image/png;base64,{base64.b64encode(png).decode()}"}


class WithComputer:
    """An app's own tools and `computer`."""

    def __init__(self, tools: Tools, computer: Computer) -> None:
        self._tools = tools
        self._computer = computer

    def tools(self) -> list[ToolSpec]:
        return [*self._tools.tools(), *self._computer.tools()]

    def call(self, name: str, arguments: Mapping[str, Any]) -> Any:
        return (self._computer if name == COMPUTER else self._tools).call(name, arguments)
