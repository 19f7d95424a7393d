"""An MCP server of FastMCP 1.x over stdio: letters, for docs/examples/office.toml.

They are files of the folder in which it runs, so each episode has its own.
"""

from pathlib import Path

from mcp.server.fastmcp import FastMCP
from mcp.types import ToolAnnotations

server = FastMCP("letters", log_level="WARNING")


@server.tool()
def write_letter(name: str, text: str) -> str:
    """Write a letter to somebody."""
    Path(f"{Path(name).name}.txt").write_text(text)
    return "written"


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def read_letters() -> dict[str, str]:
    """Read all letters, by name."""
    return {path.stem: path.read_text() for path in sorted(Path().glob("*.txt"))}


if __name__ == "__main__":
    server.run("stdio")
