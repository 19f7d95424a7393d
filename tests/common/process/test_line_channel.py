"""Children with a channel: their questions and answers, their end, and their log."""

import asyncio
import signal
from pathlib import Path

import psutil
import pytest

from flotilla_common.process.line_channel import ChildLostError, LineChannel, describe_log_end
from flotilla_common.process.python_command import python_command
from tests.support.process_commands import command_of

_ECHO = """
import sys
print("begun", file=sys.stderr, flush=True)
for line in sys.stdin:
    print(line, end="", flush=True)
"""
_DEAF = "import time\nprint(flush=True)\ntime.sleep(600)"
# Answers a question once its file exists.
_WAITING = """
import json, pathlib, sys, time
for line in sys.stdin:
    while not pathlib.Path(json.loads(line)).exists():
        time.sleep(0.01)
    print(line, end="", flush=True)
"""


async def start(program: str, log: Path | None, *, limit: int = 1 << 20) -> LineChannel:
    command = python_command("-c", program)
    return await LineChannel.start_child("the child", command, log, limit=limit)


async def test_a_child_answers_and_ends_with_its_stdin(tmp_path: Path) -> None:
    child = await start(_ECHO, tmp_path / "logs" / "child.log")
    assert await child.ask({"a": [1, None]}, 60.0) == {"a": [1, None]}
    child.stdin.write(b"a line\n")
    assert await child.read_line() == b"a line\n"
    assert child.exit_code is None
    assert child.lost is None
    await child.close(60.0)
    assert child.exit_code == 0
    assert child.describe_log_end() == f"end of {tmp_path}/logs/child.log:\nbegun"
    assert child.lost == f"the child ended with code 0; end of {tmp_path}/logs/child.log:\nbegun"


async def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    child = await start(_DEAF, tmp_path / "child.log")
    assert await child.stdout.readline() == b"\n"
    await child.close(0.1)
    assert child.exit_code == -signal.SIGKILL
    child.kill()
    await child.close(0.1)
    assert (await child.wait_until_lost()).startswith("the child was killed by signal 9; (")


async def test_a_child_ends_although_who_ends_it_is_cancelled(tmp_path: Path) -> None:
    child = await start(_DEAF, tmp_path / "child.log")
    assert await child.read_line(60.0) == b"\n"
    closing = asyncio.create_task(child.close(0.2))
    await asyncio.sleep(0.05)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert "killed by signal 9" in await child.wait_until_lost()


async def test_a_log_is_continued_and_its_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    assert "cannot read its log" in describe_log_end(log)
    log.write_bytes(b"")
    assert describe_log_end(log) == f"({log} is empty)"
    log.write_text("first\n" + "x" * 10_000 + "\n")
    child = await start(_ECHO, log)
    await child.close(60.0)
    end = child.describe_log_end()
    assert end.endswith("x\nbegun")
    assert len(end) < 5000
    assert log.read_text().startswith("first\n")


async def test_who_asks_a_child_that_ends_learns_how() -> None:
    child = await start("import sys; sys.stdin.readline(); print('half', end=''); exit(7)", None)
    with pytest.raises(ChildLostError, match=r"^the child ended with code 7$"):
        await child.ask({}, 60.0)
    with pytest.raises(ChildLostError, match=r"^the child ended with code 7$"):
        await child.ask({}, 60.0)
    await child.close()


async def test_a_late_answer_is_no_answer_to_the_next_question(tmp_path: Path) -> None:
    child = await start(_WAITING, tmp_path / "child.log")
    paths = [tmp_path / name for name in ("late", "cancelled", "prompt")]
    late, cancelled, prompt = map(str, paths)
    with pytest.raises(ChildLostError, match=r"has not answered for 0.1 s; \(.*is empty\)"):
        await child.ask(late, 0.1)
    asking = asyncio.create_task(child.ask(cancelled, 60.0))
    await asyncio.sleep(0.05)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    for path in paths:
        path.touch()
    assert await child.ask(prompt, 60.0) == prompt
    assert await asyncio.gather(*(child.ask(prompt, 60.0) for _ in range(8))) == [prompt] * 8
    await child.close(60.0)
    assert child.exit_code == 0


async def test_a_child_that_writes_too_long_a_line_is_killed() -> None:
    child = await start(
        "print('x' * 1000, flush=True)\nimport time\ntime.sleep(600)", None, limit=99
    )
    with pytest.raises(ChildLostError, match="the child wrote a line above 99 bytes"):
        await child.read_line(60.0)
    assert await child.wait_until_lost() == "the child was killed by signal 9"


async def test_a_start_that_is_cancelled_leaves_no_child(tmp_path: Path) -> None:
    mark = f"mark-{tmp_path}"
    command = python_command("-c", "import time; time.sleep(600)", mark)
    starting = asyncio.create_task(LineChannel.start_child("the child", command, None))
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(mark in command_of(each) for each in psutil.Process().children())
