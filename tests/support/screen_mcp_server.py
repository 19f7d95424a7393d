"""An MCP server over stdio whose tools are a screen, in the vocabulary that its argument names: a
picture of 320x200 pixels with a button, which turns green once it is clicked. `list_clicks` tells
the pixels that were clicked."""

import io
import json
import sys
from typing import Any, Literal

from mcp.server.mcpserver import Image, MCPServer
from mcp_types import ToolAnnotations
from PIL import Image as Picture
from PIL import ImageDraw

WIDTH, HEIGHT = 320, 200
BUTTON = (40, 60, 80, 80)
server = MCPServer("screen", log_level="WARNING")
clicks: list[tuple[int, int]] = []
typed: list[str] = []


def draw() -> bytes:
    left, top, right, bottom = BUTTON
    done = any(left <= x <= right and top <= y <= bottom for x, y in clicks)
    picture = Picture.new("RGB", (WIDTH, HEIGHT), "white")
    ImageDraw.Draw(picture).rectangle(BUTTON, "green" if done else "red")
    written = io.BytesIO()
    picture.save(written, "PNG")
    return written.getvalue()


def look() -> list[Any]:
    """The whole screen, its middle, and a line of text."""
    whole = draw()
    middle = Picture.open(io.BytesIO(whole)).crop((80, 50, 240, 150))
    written = io.BytesIO()
    middle.save(written, "PNG")
    return [Image(data=whole, format="png"), Image(data=written.getvalue(), format="png"), "URL: /"]


@server.tool(annotations=ToolAnnotations(read_only_hint=True))
def list_clicks() -> str:
    return json.dumps([clicks, typed])


def serve_cua() -> None:
    @server.tool(structured_output=False)
    def computer_screenshot() -> list[Any]:
        return look()

    @server.tool()
    def mouse_click(x: int, y: int, button: str, repeats: int = 1) -> str:
        """x and y are normalized to 0 to 1000."""
        clicks.extend([(int(x / 1000 * WIDTH), int(y / 1000 * HEIGHT))] * repeats)
        return f"clicked {button}"

    @server.tool()
    def type_text(input_text: str, press_enter: bool) -> str:
        typed.append(input_text + ("\n" if press_enter else ""))
        return "typed"


def serve_anthropic() -> None:
    @server.tool(description=f"A screen of {WIDTH}x{HEIGHT} pixels.", structured_output=False)
    def computer(
        action: Literal["screenshot", "left_click", "type"],
        coordinate: list[int] | None = None,
        text: str | None = None,
    ) -> list[Any]:
        if action == "left_click" and coordinate:
            clicks.append((coordinate[0], coordinate[1]))
        elif action == "type" and text:
            typed.append(text)
        return look()


def serve_openai() -> None:
    @server.tool(description=f"A screen of {WIDTH}x{HEIGHT} pixels.", structured_output=False)
    def computer(
        type: Literal["screenshot", "click", "type"],
        x: int | None = None,
        y: int | None = None,
        button: Literal["left", "right", "wheel"] = "left",
        text: str | None = None,
    ) -> list[Any]:
        if type == "click" and x is not None and y is not None:
            clicks.append((x, y))
        elif type == "type" and text:
            typed.append(text)
        return look()


if __name__ == "__main__":
    {"cua": serve_cua, "anthropic": serve_anthropic, "openai": serve_openai}[sys.argv[1]]()
    server.run("stdio")
