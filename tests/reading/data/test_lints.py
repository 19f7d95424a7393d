"""Faults that the env_gateway accepts."""

import json
from typing import Any

import pytest

from flotilla_common.tasks.task_format import parse_task
from flotilla_reading.data.entries import Reason
from flotilla_reading.data.lints import find_fault
from tests.reading.data.made_tasks import make_row

READS = "def v(env):\n    return env.db('seed') == env.db('current')"


def fault(**fields: Any) -> Reason | None:
    found = find_fault(parse_task(json.dumps(make_row("a", **fields))))
    return found[0] if found else None


@pytest.mark.parametrize(
    "prompt",
    [
        "Book a room for today.",
        "TOMORROW, cancel it.",
        "Move it to next Friday.",
        "What did I spend last month?",
        "Remind me in 3 days.",
        "It was two weeks ago.",
        "Due a week from now",
        "Cancel what is booked this evening.",
    ],
)
def test_a_relative_date_needs_a_current_date(prompt: str) -> None:
    assert fault(prompt=prompt) is Reason.RELATIVE_DATE
    assert fault(prompt=prompt, env_variables={"CURRENT_DATE": "2026-11-28"}) is None
    assert fault(prompt=prompt, env_variables={"CURRENT_DATE": ""}) is Reason.RELATIVE_DATE


@pytest.mark.parametrize(
    "prompt",
    [
        "Book a room for 28 November 2026.",
        "Take the next step.",
        "Rename the list 'todays' to 'Fridays'.",
        "Use the last page of the book in the last weekday folder.",
    ],
)
def test_other_words_are_no_relative_dates(prompt: str) -> None:
    assert fault(prompt=prompt) is None


def test_a_verifier_that_reads_data_needs_a_data_key() -> None:
    assert fault(verifier_func=READS) is Reason.NO_DATA_KEY
    assert fault(verifier_func="def v(env):\n    env.instance.load()") is Reason.NO_DATA_KEY
    assert fault(verifier_func=READS, data_id="seed") is None
    assert fault(verifier_func=READS, data_key="seed") is None


def test_a_verifier_of_what_was_said_needs_none() -> None:
    assert fault(verifier_func="def v(env, conversation): return 1") is None
    assert fault(verifier_func=READS, task_modality="single_turn") is None
    assert fault() is None
