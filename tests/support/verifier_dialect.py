"""Grades with a task's verifier, as `flotilla_environments.local_verifier` runs it."""

from flotilla_environments.api import Instance
from flotilla_environments.local_verifier import run_verifier


def grade(source: str, instance: Instance, final_answer: str | None = "") -> int:
    return run_verifier(source, instance, final_answer).score
