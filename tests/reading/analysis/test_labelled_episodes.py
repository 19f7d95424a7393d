"""Attempts that people have labelled, on apps that the rules have not seen."""

import statistics

import pytest

from tests.reading.analysis.label_agreement import (
    CLASSES,
    agreement,
    judge_apps,
    precision,
    recall,
)


@pytest.mark.parametrize("app", ["tracker", "shop", "booking", "shop2"])
def test_the_rules_agree_with_people_about_nine_attempts_of_ten(app: str) -> None:
    assert agreement(judge_apps([app])).value >= 0.9


def test_each_class_is_found_and_meant_nine_times_of_ten_on_average() -> None:
    counts = judge_apps()
    assert counts.total() >= 60
    assert {label for label, _ in counts} == {*CLASSES}
    assert statistics.fmean(precision(counts, name).value for name in CLASSES) >= 0.9
    assert statistics.fmean(recall(counts, name).value for name in CLASSES) >= 0.9
