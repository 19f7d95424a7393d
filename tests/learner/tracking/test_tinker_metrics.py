"""The names of the reference's Tinker entry point: each formula against values worked out by hand,
and all of them in a run whose learner.engine is "tinker", and in no other."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from flotilla_common.domain.attempts import FailureKind, StopReason
from flotilla_common.domain.trajectory import Counts, TurnTiming
from flotilla_learner.groups.graded_attempts import ReadyGroup
from flotilla_learner.tracking.metric_formulas import StepTimes
from flotilla_learner.tracking.tinker_metrics import advantage_metrics, tinker_metrics
from flotilla_learner.types import Histogram, StepResult, TrainBatch
from tests.learner.tracking.test_metric_formulas import GROUPS, group, times
from tests.learner.tracking.test_step_metrics import (
    DOCS,
    TINKER,
    Names,
    ReportingWorker,
    documented,
    pattern,
)
from tests.learner.tracking.tracked_learner import run_with
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import write_tasks

# All names of the entry point, but for `step`, which is the trackers' axis.
REFERENCE = [
    *("epoch", "advantage/mean", "advantage/std", "eval/num_samples"),
    *("reward/avg_pass_at_{n}", "reward/avg_raw_reward", "reward/variance_per_prompt"),
    *("reward/mean_positive_reward", "reward/{env}/pass_at_{n}", "reward/{env}/signal_ratio"),
    *("reward/{env}/variance_per_prompt", "reward/{env}/mean_positive_reward"),
    *(f"rollouts/{name}" for name in ("valid", "total", "invalid", "truncated_overlong")),
    *(f"rollout/{{env}}/{name}" for name in ("turns", "tool_calls", "tool_errors", "duration")),
    *("rollout/{env}/tool_error_rate", "rollout/avg_duration", "rollout/max_duration"),
    *("rollout/min_duration", "time/rollout", "time/train", "time/total"),
    *(f"time/{part}_{name}" for part in ("gen", "step") for name in ("total", "mean", "pct")),
    *(f"throughput/tokens_{name}" for name in ("total", "per_sec_gen", "per_sec_effective")),
    *("eval/all/pass_at_1", "eval/all/mean_positive_reward", "eval/{env}/pass_at_1"),
    *("eval/{env}/mean_positive_reward", "eval/{env}/variance_per_prompt"),
    "eval/{env}/signal_ratio",
]
# Of one attempt: 2 s to open, 3 s of sampling, 2 s in tools, 1 s to grade.
SLOW = Counts(turns=3, tool_calls=4, tool_errors={"bad_tool": 1}, open_s=2.0, grade_s=1.0)
TURNS = (TurnTiming(1.0, 2.0, 10, 5), TurnTiming(2.0, 0.0, 20, 5))


def slow_group(env: str, rewards: list[float], stop: StopReason = StopReason.DONE) -> ReadyGroup:
    """A group whose every attempt is `SLOW`, and whose first ended for the reason `stop`."""
    made = group(env, rewards, counts=SLOW)
    records = [replace(r, trajectory=replace(r.trajectory, turns=TURNS)) for r in made.graded]
    first = replace(records[0], trajectory=replace(records[0].trajectory, stop_reason=stop))
    return replace(made, graded=(first, *records[1:]))


def metrics_of(*groups: ReadyGroup, of: StepTimes | None = None) -> dict[str, float]:
    return tinker_metrics(groups, of or times(10.0), 2.75)


def test_rewards_by_hand() -> None:
    metrics = metrics_of(*GROUPS)
    # Rewards above 0: 1, 1, 0.5, 1.5, 0.5, 0.5.
    assert metrics["reward/mean_positive_reward"] == pytest.approx(5 / 6)
    assert metrics["reward/shop/pass_at_4"] == 0.5
    assert metrics["reward/desk_a/pass_at_4"] == 1.0
    assert metrics_of(group("shop", [0.0, 0.0]))["reward/mean_positive_reward"] == 0.0


def test_an_attempt_without_a_grade_is_counted_as_invalid_and_is_in_no_mean() -> None:
    made = slow_group("shop", [1.0, 0.0])
    lost = replace(
        made.graded[0],
        trajectory=replace(made.graded[0].trajectory, reward=None, failure=FailureKind.ENV_LOST),
    )
    metrics = metrics_of(replace(made, failed=(lost, lost, lost)))
    assert metrics["rollouts/valid"] == 2
    assert metrics["rollouts/invalid"] == 3
    assert metrics["rollouts/total"] == 5
    assert metrics["reward/mean_positive_reward"] == 1.0
    assert metrics["time/gen_total"] == 6.0


@pytest.mark.parametrize("stop", list(StopReason))
def test_truncated_are_the_attempts_that_a_limit_of_length_cut_off(stop: StopReason) -> None:
    cut = stop in {"context_overflow", "generation_length"}
    metrics = metrics_of(slow_group("shop", [1.0, 0.0], stop), group("shop", [1.0, 0.0]))
    assert metrics["rollouts/truncated_overlong"] == float(cut)


def test_advantages_are_averaged_by_sequence_not_by_token() -> None:
    found = advantage_metrics(np.array(each) for each in ([1.0, 1.0, 1.0], [-1.0], [], [0.5, 1.5]))
    assert found["advantage/mean"] == pytest.approx(1 / 3)
    # Of 1, -1 and 1: the root of 8 / 9.
    assert found["advantage/std"] == pytest.approx((8 / 9) ** 0.5)
    assert advantage_metrics([np.zeros(0)]) == {}


def test_figures_of_an_environment_by_hand() -> None:
    metrics = metrics_of(slow_group("desk/a", [1.0, 0.0]), group("shop", [1.0, 0.0]))
    assert metrics["rollout/desk_a/turns"] == 3
    assert metrics["rollout/desk_a/tool_calls"] == 4
    assert metrics["rollout/desk_a/tool_errors"] == 1
    assert metrics["rollout/desk_a/tool_error_rate"] == 0.25
    assert metrics["rollout/desk_a/duration"] == 8.0
    # No calls, and two turns of 0.5 s of sampling with 1 s in tools in all.
    assert metrics["rollout/shop/tool_error_rate"] == 0.0
    assert metrics["rollout/shop/duration"] == 2.0


def test_durations_are_of_whole_attempts() -> None:
    metrics = metrics_of(slow_group("shop", [1.0, 0.0]), group("shop", [1.0, 0.0]))
    assert metrics["rollout/avg_duration"] == 5.0
    assert metrics["rollout/max_duration"] == 8.0
    assert metrics["rollout/min_duration"] == 2.0


def test_seconds_by_hand() -> None:
    metrics = metrics_of(slow_group("shop", [1.0, 0.0]), of=times(10.0, rollout=6.0, train=3.0))
    assert (metrics["time/rollout"], metrics["time/train"], metrics["time/total"]) == (6, 3, 10)
    assert (metrics["time/gen_total"], metrics["time/gen_mean"]) == (6.0, 3.0)
    # Two seconds in tools and one for the grade.
    assert (metrics["time/step_total"], metrics["time/step_mean"]) == (6.0, 3.0)
    assert (metrics["time/gen_pct"], metrics["time/step_pct"]) == (37.5, 37.5)


def test_tokens_per_second_are_those_of_one_attempt_by_hand() -> None:
    """An attempt's ten tokens take it 3 s of sampling in 8 s."""
    metrics = metrics_of(slow_group("shop", [1.0, 0.0]))
    assert metrics["throughput/tokens_total"] == 20
    assert metrics["throughput/tokens_per_sec_gen"] == pytest.approx(20 / 6)
    assert metrics["throughput/tokens_per_sec_effective"] == pytest.approx(20 / 16)


def test_attempts_that_took_no_time_are_no_division_by_zero() -> None:
    made = group("shop", [1.0, 0.0])
    records = tuple(replace(r, trajectory=replace(r.trajectory, turns=())) for r in made.graded)
    metrics = metrics_of(replace(made, graded=records))
    assert metrics["time/gen_pct"] == metrics["throughput/tokens_per_sec_gen"] == 0.0


def test_an_epoch_is_a_whole_pass_over_the_tasks() -> None:
    assert metrics_of(*GROUPS)["epoch"] == 2.0


class RanksWithAdvantages(FakeRanks):
    """Report what is known of advantages, as the ranks of a service do."""

    async def train_step(self, batch: TrainBatch) -> StepResult:
        result = await super().train_step(batch)
        rewards = advantage_metrics(np.array([each.reward]) for each in batch.sequences)
        return replace(result, metrics={**result.metrics, **rewards})


class Logged(Names):
    """Keeps the samples of each evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[float] = []

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        super().log_metrics(step, metrics, histograms)
        self.samples += [n for name, n in metrics.items() if name == "eval/num_samples"]


async def logged_by(tmp_path: Path, engine: str) -> Logged:
    heldout = write_tasks(tmp_path / "heldout.json", 3, prefix="heldout")
    sets = [{"name": n, "tasks": str(heldout), "attempts": 2} for n in ("heldout", "greedy")]
    names = Logged()
    await run_with(
        tmp_path,
        names,
        ranks=RanksWithAdvantages(tmp_path / "weights"),
        worker=ReportingWorker,
        engine=engine,
        lora={"rank": 4},
        guard={"mode": "off"},
        eval={"sets": sets},
        steps=2,
    )
    return names


def test_docs_name_what_the_other_sections_do_not() -> None:
    text = DOCS.read_text()
    section = text[text.index(TINKER) : text.index("### Histograms")]
    rows = [line.split(" | ")[0] for line in section.splitlines() if line.startswith("| `")]
    named = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    others = set(documented("## Names", TINKER)) - set(named)
    assert set(named) <= set(REFERENCE)
    unnamed = [name for name in REFERENCE if name not in named]
    assert [n for n in unnamed if not any(pattern(d).fullmatch(n) for d in others)] == []


async def test_a_run_at_a_tinker_service_logs_every_name_of_the_reference(tmp_path: Path) -> None:
    found = await logged_by(tmp_path, "tinker")
    missing = [d for d in REFERENCE if not any(pattern(d).fullmatch(n) for n in found.metrics)]
    assert missing == []
    # Of `heldout` only: each of its three tasks twice.
    assert set(found.samples) == {6.0}


async def test_any_other_run_logs_our_names_only(tmp_path: Path) -> None:
    found = await logged_by(tmp_path, "ranks")
    assert found.samples == []
    assert not [name for name in found.metrics if re.match(r"epoch|rollouts?/|time/", name)]
