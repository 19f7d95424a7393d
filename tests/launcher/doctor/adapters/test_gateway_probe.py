"""Environments that cannot be opened, and backends that do not start."""

import json
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from flotilla_environments.tasks import make_task
from flotilla_launcher.doctor.findings import Status
from tests.support.doctor import check, probed, spec, subject


async def test_an_environment_that_cannot_be_opened_is_named_and_the_others_show_their_tools(
    policy: Path, tmp_path: Path
) -> None:
    known, unknown = make_task("booking", "train", 0), make_task("tracker", "train", 0)
    path = tmp_path / "tasks.json"
    path.write_text(json.dumps([known, {**unknown, "env_id": "teleporter"}]))
    result = await probed("episodes", subject(spec(policy, path), tmp_path))
    check(result, Status.FAIL, "teleporter cannot be opened", "or correct env_id of its tasks")
    check(result, Status.FAIL, "booking: 4 tools (book_room,")
    assert not children()


def children() -> list[str]:
    """Gateways that this process has started and not ended."""
    found: list[str] = []
    for child in psutil.Process().children(recursive=True):
        # A gateway that is just ending has none.
        with suppress(psutil.NoSuchProcess):
            found.append(" ".join(child.cmdline()))
    return [command for command in found if "flotilla_env_gateway" in command]


async def test_a_backend_that_does_not_start_is_quoted_with_its_error(
    policy: Path, tasks: Path, tmp_path: Path
) -> None:
    command = json.dumps([sys.executable, "-c", "raise SystemExit('no licence')"])
    short = ("env_gateway.open_timeout_s=1.0", "env_gateway.close_timeout_s=1.0")
    content = spec(policy, tasks, "env_gateway.backend=mcp", *short)
    content["env_gateway"]["servers"] = [{"command": json.loads(command), "instances": True}]
    result = await probed("episodes", subject(content, tmp_path))
    check(result, Status.FAIL, "booking cannot be opened", "code 1 and wrote: no licence")
