"""Grades with a task's verifier, as `environments.local_verifier` runs it."""

from environments.api import Instance
from environments.local_verifier import run_verifier


def grade(source: str, instance: Instance, final_answer: str | None = "") -> int:
    return run_verifier(source, instance, final_answer).score
