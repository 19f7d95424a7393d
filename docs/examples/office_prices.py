"""An MCP server of FastMCP 1.x over HTTP, behind a key: prices, for docs/examples/office.toml."""

import os
import secrets

from mcp.server.auth.provider import AccessToken
from mcp.server.auth.settings import AuthSettings
from mcp.server.fastmcp import FastMCP
from mcp.types import ToolAnnotations
from pydantic import AnyHttpUrl

KEY = os.environ["OFFICE_KEY"]
PRICES = {"lamp": 12, "shelf": 17, "sofa": 40}
URL = AnyHttpUrl("http://127.0.0.1:8766/mcp")


class KeyVerifier:
    """Accepts requests with the header `Authorization: Bearer KEY`."""

    async def verify_token(self, token: str) -> AccessToken | None:
        known = secrets.compare_digest(token.encode(), KEY.encode())
        return AccessToken(token=token, client_id="office", scopes=[]) if known else None


server = FastMCP(
    "prices",
    host="127.0.0.1",
    port=8766,
    log_level="WARNING",
    token_verifier=KeyVerifier(),
    auth=AuthSettings(issuer_url=URL, resource_server_url=None),
)


@server.tool(annotations=ToolAnnotations(readOnlyHint=True))
def find_price(item: str) -> int:
    """Find the price of an item."""
    return PRICES[item]


if __name__ == "__main__":
    server.run("streamable-http")
