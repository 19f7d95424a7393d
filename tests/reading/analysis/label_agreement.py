"""How far the rules agree with people about labelled attempts: the numbers of docs/evaluation.md.

python -m tests.reading.analysis.label_agreement"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from flotilla_common.domain.task_means import wilson_interval
from flotilla_common.text.printable_text import print_visible
from flotilla_reading.analysis.failure_classes import OTHER, RULES, classify
from tests.reading.analysis.scripted_play import FOLDER, play_scripts

APPS = ("tracker", "shop", "booking", "shop2")
CLASSES = (*(rule.name for rule in RULES), OTHER)


@dataclass(frozen=True, slots=True)
class Share:
    """A share with its 95 % interval (Wilson)."""

    part: int
    whole: int

    @property
    def value(self) -> float:
        return self.part / self.whole

    def __str__(self) -> str:
        if not self.whole:
            return "-"
        low, high = wilson_interval(self.value, self.whole)
        return f"{self.value:.2f} [{low:.2f}, {high:.2f}]"


def judge_apps(apps: Sequence[str] = APPS) -> Counter[tuple[str, str]]:
    """Count the attempts by their label and the rules' main class."""
    found = Counter[tuple[str, str]]()
    for app in apps:
        labels = [
            line.split()[1] for line in (FOLDER / f"{app}_labels.txt").read_text().splitlines()
        ]
        for label, row in zip(labels, play_scripts(app), strict=True):
            found[label, classify(row)[0]] += 1
    return found


def precision(counts: Counter[tuple[str, str]], name: str) -> Share:
    return Share(counts[name, name], sum(n for (_, rules), n in counts.items() if rules == name))


def recall(counts: Counter[tuple[str, str]], name: str) -> Share:
    return Share(counts[name, name], sum(n for (label, _), n in counts.items() if label == name))


def agreement(counts: Counter[tuple[str, str]]) -> Share:
    return Share(sum(counts[name, name] for name in CLASSES), counts.total())


def main() -> None:
    counts = judge_apps()
    print_visible(f"| label \\ rules | {' | '.join(CLASSES)} | precision | recall |")
    print_visible("|---" * (len(CLASSES) + 3) + "|")
    for label in CLASSES:
        cells = [str(counts[label, name] or "") for name in CLASSES]
        figures = [str(precision(counts, label)), str(recall(counts, label))]
        print_visible(f"| {' | '.join([label, *cells, *figures])} |")
    for app in APPS:
        print_visible(f"{app}: {agreement(judge_apps([app]))}")
    print_visible(f"all {counts.total()}: {agreement(counts)}")


if __name__ == "__main__":
    main()
