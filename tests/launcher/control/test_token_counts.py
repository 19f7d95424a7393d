"""Tokens of a run, counted from reports that come in any order and more than once."""

import random
from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from flotilla_launcher.control.token_counts import note_tokens, sum_tokens
from flotilla_launcher.state import TokenCount

# The totals of one process, as it reports them in the course of its life.
LIFE = st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), min_size=1, max_size=6)


def report(sampled: float, prompt: float = 0.0, trained: float = 0.0) -> Mapping[str, float]:
    return {
        "tokens/prompt_total": prompt,
        "tokens/sampled_total": sampled,
        "tokens/trained_total": trained,
    }


def grow(steps: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the running totals of what a process uses."""
    totals, prompt, sampled = list[tuple[int, int]](), 0, 0
    for more_prompt, more_sampled in steps:
        prompt, sampled = prompt + more_prompt, sampled + more_sampled
        totals.append((prompt, sampled))
    return totals


@given(st.lists(LIFE, max_size=5), st.randoms(use_true_random=False))
def test_all_that_processes_used_is_counted_once_in_whatever_order_reports_come(
    lives: list[list[tuple[int, int]]], chance: random.Random
) -> None:
    reports = [
        (f"process-{number}", prompt, sampled)
        for number, life in enumerate(lives)
        for prompt, sampled in grow(life)
    ]
    reports += chance.choices(reports, k=len(reports)) if reports else []
    chance.shuffle(reports)
    counts: Mapping[str, TokenCount] = {}
    before = TokenCount()
    for source, prompt, sampled in reports:
        counts = note_tokens(counts, "rollout", source, report(sampled, prompt))
        now = sum_tokens(counts)
        assert min(now.since(before).prompt, now.since(before).sampled) >= 0
        before = now
    wanted = [grow(life)[-1] for life in lives]
    assert before == TokenCount(sum(p for p, _ in wanted), sum(s for _, s in wanted), 0)


def test_a_learner_counts_on_where_the_one_before_it_ended() -> None:
    counts = note_tokens({}, "learner", "first", report(0, trained=500))
    # It has not read its state yet.
    counts = note_tokens(counts, "learner", "second", {})
    counts = note_tokens(counts, "learner", "second", report(0, trained=700))
    assert sum_tokens(counts) == TokenCount(trained=700)


def test_what_a_learner_says_of_samples_and_others_of_training_is_not_counted_twice() -> None:
    counts = note_tokens({}, "learner", "a", report(90, 90, 5))
    counts = note_tokens(counts, "rollout", "b", report(7, 9, 90))
    assert sum_tokens(counts) == TokenCount(9, 7, 5)


def test_metrics_without_tokens_or_with_impossible_ones_change_nothing() -> None:
    known = {"b": TokenCount(1, 1)}
    for metrics in ({}, report(-5, float("-inf")), report(float("nan"), 0.5)):
        assert note_tokens(known, "rollout", "b", metrics) is known
    endless = note_tokens(known, "rollout", "b", report(float("inf")))
    assert sum_tokens(endless).sampled == 2**53
