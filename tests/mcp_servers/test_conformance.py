"""The client scenarios of the official conformance suite, played by the gateway's own session."""

import asyncio
import re
import sys
from pathlib import Path

import pytest

from tests.mcp_servers.public_servers import npm_command
from tests.support.repository import ROOT

pytestmark = pytest.mark.mcp_servers

APPLICABLE = ("initialize", "tools_call", "sse-retry")
_AUTHORIZATION = (
    "OAuth: a gateway has nobody who could log in; the key of a server is a header of the settings"
)
# Scenarios that ask for what the gateway does not offer, and why it does not.
NOT_OFFERED = {
    r"elicitation-.*": "a policy is asked nothing but its task: elicitation is refused (-32601)",
    r"auth/.*": _AUTHORIZATION,
}


async def run_suite(*words: str) -> str:
    """Return what the suite prints. Raises AssertionError if it fails."""
    process = await asyncio.create_subprocess_exec(
        *npm_command("conformance", *words),
        cwd=ROOT,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("scenario", APPLICABLE)
async def test_the_gateways_session_passes_a_scenario(scenario: str, tmp_path: Path) -> None:
    client = f"{sys.executable} -m tests.mcp_servers.conformance_client"
    words = ("client", "--command", client, "--scenario", scenario, "-o", str(tmp_path))
    assert "OVERALL: PASSED" in await run_suite(*words)


async def test_every_scenario_applies_or_asks_for_what_is_not_offered() -> None:
    listed = (await run_suite("list", "--client")).partition("Client scenarios")[2]
    scenarios = re.findall(r"^  - (\S+)", listed, re.MULTILINE)
    left_out = [name for name in scenarios if any(re.fullmatch(each, name) for each in NOT_OFFERED)]
    assert len(left_out) > 20
    assert sorted({*scenarios} - {*left_out}) == sorted(APPLICABLE)
