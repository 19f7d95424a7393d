"""The search for the verifier in a source, which does not block the gateway."""

import asyncio
import subprocess
import time
from typing import Any

import pytest

from flotilla_common.tasks.task_format import MAX_SOURCE_BYTES, TaskError, parse_task
from flotilla_env_gateway.verify import verifier_finder
from flotilla_env_gateway.verify.verifier_finder import VerifierFinder
from flotilla_env_gateway.verify.verifier_source import VerifierError, VerifierFunction
from tests.support.fake_gateway import task_json

LONG = "x = 1\n" * 20_000
VERIFIER = "def verify(env, final_answer=None): return 1\n"


async def test_a_long_source_is_parsed_in_another_process_and_once() -> None:
    finder = VerifierFinder()
    began, began_s = time.thread_time(), time.monotonic()
    found = await asyncio.gather(*(finder.find_function(VERIFIER + LONG) for _ in range(8)))
    assert set(found) == {VerifierFunction("verify", True, False)}
    first_s = time.monotonic() - began_s
    assert time.thread_time() - began < first_s / 2
    began_s = time.monotonic()
    assert await finder.find_function(VERIFIER + LONG) == found[0]
    assert time.monotonic() - began_s < first_s / 4


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("-" * 100_000 + "1", "does not compile"),
        ("(" * 100_000, "too many nested parentheses"),
        ("a." * 100_000 + "a", "defines no function|does not compile"),
        (LONG, "defines no function"),
        ("\0" * 10_000, "null bytes"),
        (VERIFIER + " " * MAX_SOURCE_BYTES, "262189 bytes, more than 262144"),
        ("async " + VERIFIER + LONG, "only plain functions run"),
    ],
    ids=lambda value: repr(value)[:12],
)
async def test_a_source_that_is_no_verifier_is_reported(source: str, message: str) -> None:
    for _ in range(2):
        with pytest.raises(VerifierError, match=message):
            await VerifierFinder().find_function(source)


async def test_a_source_that_takes_too_long_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_finder, "_TIMEOUT_S", 0.001)
    with pytest.raises(VerifierError, match=r"does not compile within 0\.001 s"):
        await VerifierFinder().find_function(VERIFIER + LONG)


async def test_a_decorator_of_any_depth_is_only_named() -> None:
    deep = "verifier" + "(1)" * 90
    assert (await VerifierFinder().find_function(f"@{deep}\n{VERIFIER}")).name == "verify"


def test_a_task_with_a_longer_verifier_is_refused() -> None:
    with pytest.raises(TaskError, match="verifier_func has 300000 bytes, more than 262144"):
        parse_task(task_json(verifier_func="#" * 300_000))


async def test_what_was_found_is_forgotten_some_day(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verifier_finder, "_KEPT", 2)
    finder: Any = VerifierFinder()
    for number in range(5):
        await finder.find_function(f"{VERIFIER}# {number}")
    assert len(finder._known) == 2


def test_the_process_that_parses_has_bounds_of_its_own() -> None:
    reported = "; import resource as r; print(*map(r.getrlimit, (r.RLIMIT_AS, r.RLIMIT_CPU)))"
    inside: Any = verifier_finder
    *command, program, gateway, common = inside._COMMAND
    ran = subprocess.run(
        [*command, program + reported, gateway, common],
        input=VERIFIER,
        text=True,
        capture_output=True,
        check=True,
    )
    assert ran.stdout.splitlines()[-1] == f"({2**30}, {2**30}) (5, 5)"
