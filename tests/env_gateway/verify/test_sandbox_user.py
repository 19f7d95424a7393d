"""The sandbox of a gateway that is not root's, where these tests are: what `test_sandbox.py` holds,
once more."""

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.env_gateway.verify.ordinary_user import as_ordinary_user, environment
from tests.env_gateway.verify.sandboxed import needs_sandbox

pytestmark = [
    needs_sandbox,
    pytest.mark.skipif(os.geteuid() != 0, reason="an ordinary user runs test_sandbox.py itself"),
]


async def test_an_ordinary_users_verifiers_stay_in_their_sandbox_too() -> None:
    await run_as_ordinary_user("-k", "reaches_nothing or needs or every_other_kind or forged")


@pytest.mark.slow
async def test_all_that_holds_for_roots_verifiers_holds_for_an_ordinary_users() -> None:
    await run_as_ordinary_user()


async def run_as_ordinary_user(*selected: str) -> None:
    file = Path(__file__).with_name("test_sandbox.py")
    process = await asyncio.create_subprocess_exec(
        *as_ordinary_user([sys.executable, "-m", "pytest", "-q", *selected, str(file)]),
        # The assertions contain the report of a failure; rewriting them takes seconds.
        *("--assert", "plain", "-p", "no:cacheprovider"),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        cwd=file.parents[2],
        env=environment(),
    )
    output, _ = await process.communicate()
    # Not skipped, above all.
    assert process.returncode == 0 and b" skipped" not in output, output.decode("utf-8", "replace")
