"""Screens of modalities: their tools' endpoints, and checks that they show anything. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from flotilla_env_gateway.adapters.fleet.browser import BrowserLease
from flotilla_env_gateway.ports import BackendError, CallResult, Media, Part
from flotilla_env_gateway.tools.computer_tool import parse_first_screenshot, summarize_parts

SCREENSHOT = {"action": "screenshot"}
# A browser that has not drawn its page answers with less than this: one colour compresses well.
_DRAWN_BYTES = 6144
# The container whose MCP server has the screen.
_SCREEN_IMAGE = "mcp"
_SCREEN_IN_IMAGE = ("computer_use", "joint")


def image_type(modality: str) -> str | None:
    return _SCREEN_IMAGE if modality in _SCREEN_IN_IMAGE else None


def tool_endpoints(root: str, modality: str, lease: BrowserLease | None) -> Sequence[str]:
    """List the endpoints that may serve tools, the environment's before its screen's."""
    if lease is not None:
        return [lease.mcp_url]
    aggregator = f"{root}api/v1/mcp"
    return [aggregator] if modality == "computer_use" else [f"{root}mcp", aggregator]


def page_url(body: Mapping[str, Any]) -> str:
    """Return the URL at which an instance shows its web pages."""
    urls = body["urls"]
    return (urls.get("app") or [urls["root"]])[0]


def navigate_action(url: str) -> dict[str, str]:
    return {"action": "navigate", "url": url}


def check_page_opened(url: str, result: CallResult) -> None:
    """Raise BackendError if a browser did not open a page."""
    if result.is_error:
        message = f"the browser did not open {url}: {summarize_parts(result.parts)}"
        raise BackendError("no_page", message, delivered=False)


async def parse_screenshot(result: CallResult, *, in_browser: bool) -> Sequence[Part]:
    """Return the parts of a first screenshot. Raises BackendError if it shows nothing (yet)."""
    parts = await parse_first_screenshot(result)
    size = max(len(part.data) for part in parts if isinstance(part, Media))
    if in_browser and size < _DRAWN_BYTES:
        message = f"the browser has not drawn its page: a picture of {size} bytes"
        raise BackendError("no_screenshot", message, delivered=False)
    return parts
