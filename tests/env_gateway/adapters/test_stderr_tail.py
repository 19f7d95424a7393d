"""The standard error of a command: what is passed on of it, and kept."""

import sys

import pytest
from structlog.testing import capture_logs

from flotilla_common.text import redaction
from flotilla_common.text.redaction import add_secret
from flotilla_env_gateway.adapters import stderr_tail
from flotilla_env_gateway.adapters.child_process import ChildProcess
from flotilla_env_gateway.adapters.stderr_tail import PASSED_BYTES, OutputAllowance
from tests.support.loop_watch import watched_loop

_FLOOD_BYTES = 8 * 2**20


def writing(line: str, count: int, last: str) -> tuple[str, ...]:
    script = f"import sys; sys.stderr.write({line!r} * {count} + {last!r})"
    return (sys.executable, "-c", script)


async def end_of(child: ChildProcess) -> None:
    """Wait for the end of a process, and close it."""
    await child.stdout.read()
    await child.close()


@pytest.mark.parametrize("line", ["\n", "x" * 99 + "\n", "y"])
async def test_a_flood_is_cut_and_its_end_kept(
    line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    command = writing(line, _FLOOD_BYTES // len(line), "\nlast words\n")
    with capture_logs() as events:
        async with watched_loop() as watch:
            child = await ChildProcess.start(command, {})
            await end_of(child)
    assert (await child.describe_end()).endswith("and wrote: last words")
    passed = len(capfd.readouterr().err)
    assert 0 < passed <= PASSED_BYTES
    [event] = [each for each in events if each["event"] == "stderr_dropped"]
    assert event["command"] == sys.executable
    written = len(line) * (_FLOOD_BYTES // len(line)) + len("\nlast words\n")
    assert event["bytes"] == written - passed
    assert watch.longest_s < 0.05


async def test_output_within_the_bounds_is_passed_on_whole(
    capfd: pytest.CaptureFixture[str],
) -> None:
    child = await ChildProcess.start(writing("warning\n", 20_000, "the end"), {})
    await end_of(child)
    assert capfd.readouterr().err == "warning\n" * 20_000 + "the end"


async def test_the_error_is_named_that_node_ends_at() -> None:
    report = "x.js:1\n  err = new Error(\n\nError: no bindings. Tried:\n - a\n    at b (x.js:1)\n\n"
    child = await ChildProcess.start(writing("", 0, f"{report}Node.js v20.1.0\n"), {})
    await end_of(child)
    assert (await child.describe_end()).endswith("and wrote: Error: no bindings. Tried:")


async def test_no_part_of_a_secret_is_shown_where_the_end_is_cut(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(redaction, "_secrets", set[str]())
    monkeypatch.setattr(redaction, "_hidden", list[str]())
    add_secret("s3cret-" * 40)
    kept = stderr_tail._KEPT_BYTES  # pyright: ignore[reportPrivateUsage]
    command = writing("s3cret-" * 40, 1, f"{' ' * (kept - 100)}\n")
    child = await ChildProcess.start(command, {})
    await end_of(child)
    end = await child.describe_end()
    assert end.startswith("it ended with code 0") and "s3cret" not in end


def test_what_is_dropped_counts_until_it_is_told() -> None:
    allowance = OutputAllowance(passed_bytes=100, period_s=60.0)
    assert allowance.admits(60, 0.0) and not allowance.admits(60, 1.0)
    assert not allowance.admits(1, 59.0), "nor a smaller piece, which would seem to follow"
    assert allowance.admits(100, 60.0)
    assert (allowance.take_dropped(), allowance.take_dropped()) == (61, 0)
