"""The files of this folder belong together. Needs nothing but pytest: `python -m pytest tests`."""

import hashlib
import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1]


def read_lines(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (FOLDER / name).read_text().splitlines()]


def test_every_task_has_a_key_of_its_own_and_says_what_it_expects() -> None:
    tasks = read_lines("tasks/train.jsonl") + read_lines("tasks/heldout.jsonl")
    assert len({task["key"] for task in tasks}) == len(tasks) > 0
    assert all(task["metadata"].get("state") or task["metadata"].get("answer") for task in tasks)


def test_no_held_out_task_is_trained_on() -> None:
    trained = {task["prompt"] for task in read_lines("tasks/train.jsonl")}
    assert not trained & {task["prompt"] for task in read_lines("tasks/heldout.jsonl")}


def test_every_solution_and_demonstration_is_one_of_a_task() -> None:
    trained = {task["key"] for task in read_lines("tasks/train.jsonl")}
    heldout = {task["key"] for task in read_lines("tasks/heldout.jsonl")}
    assert {row["key"] for row in read_lines("solutions.jsonl")} <= trained | heldout
    assert {row["key"] for row in read_lines("demonstrations.jsonl")} <= trained


def test_the_verifier_is_the_one_whose_digest_is_listed() -> None:
    digest = hashlib.sha256((FOLDER / "verifier.py").read_bytes()).hexdigest()
    assert digest in (FOLDER / "verifiers.sha256").read_text()
