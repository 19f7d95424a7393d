"""Data ids of questions, which carry the expected answer.

`train-000012=72` is question 12 of `train` with the answer 72. So an instance needs no data file,
and the policy, which never sees a data id, cannot look up the answer."""

import re

from flotilla_environments.app import Scenario

# Names for the same kind, so that metrics separate them: the user's own questions, those of
# `flotilla_environments.gsm8k.arithmetic`, and those of other data.
SINGLE_TURN_KEYS = ("gsm8k", "arithmetic", "questions")
# Questions whose verifiers know the answer: they have no data.
WITHOUT_DATA = "questions"
NUMBER = re.compile(r"-?[0-9]+(\.[0-9]+)?")
_DATA_ID = re.compile(rf"[A-Za-z0-9][A-Za-z0-9_.-]*=(?P<answer>{NUMBER.pattern})")


def make_question_id(split: str, index: int, answer: str) -> str:
    return f"{split}-{index:06d}={answer}"


def question_scenario(env_key: str, data_id: str, data_version: str) -> Scenario:
    """An environment without tables. Raises `ValueError` for a data id without an answer."""
    match = _DATA_ID.fullmatch(data_id)
    if match is None and (data_id or env_key != WITHOUT_DATA):
        raise ValueError(
            f"data id {data_id!r} not found: use SPLIT-NUMBER=ANSWER, such as train-000012=72"
        )
    return Scenario(
        slots={"answer": match["answer"]} if match else {},
        targets={},
        pair=("", ""),
        tables={},
        env_key=env_key,
        data_id=data_id,
        data_version=data_version,
        kind="question",
        prompt="",
    )
