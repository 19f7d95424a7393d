"""Grades with a task's verifier, as `environments.verdict` runs it."""

from environments.api import Instance
from environments.verdict import run_verifier


def grade(source: str, instance: Instance, final_answer: str | None = "") -> int:
    return run_verifier(source, instance, final_answer).result


def grade_in_detail(
    source: str, instance: Instance, final_answer: str | None = ""
) -> tuple[int, str, int]:
    """(result, what it printed, number of queries)."""
    verdict = run_verifier(source, instance, final_answer)
    return verdict.result, verdict.stdout, verdict.queries
