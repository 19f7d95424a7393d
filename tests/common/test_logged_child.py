"""Children that log into a file: their input, their end, and their log."""

import signal
from pathlib import Path

from services.common.logged_child import LoggedChild, describe_log_end
from services.common.python_command import python_command

_ECHO = """
import sys
print("begun", file=sys.stderr, flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
_DEAF = "import time\nprint(flush=True)\ntime.sleep(600)"


async def start(program: str, log: Path) -> LoggedChild:
    return await LoggedChild.start_child(python_command("-c", program), log)


async def test_a_child_answers_and_ends_with_its_stdin(tmp_path: Path) -> None:
    child = await start(_ECHO, tmp_path / "logs" / "child.log")
    child.stdin.write(b"a line\n")
    assert await child.stdout.readline() == b"a line\n"
    assert child.exit_code is None
    child.stdin.close()
    await child.end_within(60.0)
    assert child.exit_code == 0
    assert child.describe_log_end() == f"end of {tmp_path}/logs/child.log:\nbegun"


async def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    child = await start(_DEAF, tmp_path / "child.log")
    assert await child.stdout.readline() == b"\n"
    child.stdin.close()
    await child.end_within(0.1)
    assert child.exit_code == -signal.SIGKILL
    child.kill()
    await child.end_within(0.1)
    assert await child.wait_until_ended() == -signal.SIGKILL


async def test_a_log_is_continued_and_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    assert "cannot read its log" in describe_log_end(log)
    log.write_bytes(b"")
    assert describe_log_end(log) == f"({log} is empty)"
    log.write_text("first\n" + "x" * 10_000 + "\n")
    child = await start(_ECHO, log)
    child.stdin.close()
    await child.end_within(60.0)
    end = child.describe_log_end()
    assert end.endswith("x\nbegun")
    assert len(end) < 5000
    assert log.read_text().startswith("first\n")
