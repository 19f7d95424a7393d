"""docs/metrics.md names every metric that a run logs, and nothing else."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from flotilla.learner.v1 import group_service_pb2 as pb
from flotilla.learner.v1 import trajectory_pb2
from flotilla_common.domain.attempts import FailureKind
from flotilla_common.process.run_membership import ReplicaStatus
from flotilla_env_gateway.api import alarms
from flotilla_env_gateway.tools import tool_drift
from flotilla_learner.alarms import event_rules, learning_rules, task_rules
from flotilla_learner.ports import TrackedRun
from flotilla_learner.types import Histogram, StepResult, TrainBatch, VersionMismatch
from flotilla_rollout.api import service_alarm
from tests.learner.rank.test_critic import gae
from tests.learner.tracking.tracked_learner import run_with
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import FakeWorker, failed, graded, make_turns, write_tasks
from tests.support.repository import ROOT
from tests.support.tiny_ranks import make_batch, make_trainer

DOCS = ROOT / "docs" / "metrics.md"
NAMES, HISTOGRAMS = "## Names", "### Histograms"
# Only of a run at a Tinker service, see test_tinker_metrics.py.
TINKER = "### Names of the reference's Tinker entry point"
# No upload ends within the test, no launcher reports prices, no engine of experts, nothing is
# compiled and nothing dumped, no service trains, nothing is imitated, nobody teaches or judges, no
# candidates are named: tests/learner/checkpoints, tests/learner/run/test_step_recorder.py,
# test_metric_formulas.py, tests/learner/dumps, tests/learner/hosted, tests/learner/imitation,
# tests/learner/teacher, tests/learner/judge, and in tests/learner/rank test_routing_replay.py,
# test_block_compilation.py and test_trainer_distillation.py have them.
ELSEWHERE = (
    "with `checkpoint.remote`",
    "whose price is known",
    "with `policy.routing_replay`",
    "with `learner.top_k`",
    "with `learner.dumps`",
    "with `learner.rank.compile`",
    'with `learner.engine = "tinker"`',
    'with `learner.objective = "sft"`',
    "with `learner.teacher`",
    "with `learner.judge`",
)


def documented(start: str, end: str) -> Iterator[str]:
    """The names in the first columns of the tables between two headings."""
    text = DOCS.read_text()
    for line in text[text.index(start) : text.index(end)].splitlines():
        if line.startswith("| `") and not any(each in line for each in ELSEWHERE):
            yield from re.findall(r"`([^`]+/[^`]+)`", line.split(" | ")[0])


def pattern(name: str) -> re.Pattern[str]:
    """Return the pattern of a name with {placeholders}."""
    parts = re.split(r"\{\w+\}", name)
    return re.compile("[^/]+".join(re.escape(part) for part in parts))


class Names:
    """Keeps every name. Implements `Tracker`."""

    def __init__(self) -> None:
        self.metrics: set[str] = set()
        self.histograms: set[str] = set()

    def open_run(self, run: TrackedRun) -> str | None:
        """There is nothing to open."""

    def log_metrics(
        self, step: int, metrics: Mapping[str, float], histograms: Mapping[str, Histogram]
    ) -> None:
        self.metrics |= metrics.keys()
        self.histograms |= histograms.keys()

    def close(self) -> None:
        """Nothing is held."""


class ReportingRanks(FakeRanks):
    """Report the result of a trainer with every term of the loss."""

    def __init__(self, folder: Path, result: StepResult) -> None:
        super().__init__(folder)
        self._result = result

    async def train_step(self, batch: TrainBatch) -> StepResult:
        await super().train_step(batch)
        versions = {batch.step - 1: VersionMismatch(10, 1e-9, 1e-6, 1e-6, 1e-6)}
        return replace(self._result, versions=versions)


class ReportingWorker(FakeWorker):
    """Loses its first group of training, and reports tools and times."""

    lost = 0

    async def play(self, lease: pb.Lease) -> None:
        for attempt in lease.attempts:
            if lease.purpose == pb.PURPOSE_TRAIN and self.lost < 2:
                self.lost += 1
                await self.submit(failed(lease, attempt, trajectory_pb2.FAILURE_KIND_ENV_LOST))
                continue
            submission = graded(lease, attempt, self.policy)
            submission.header.turns.CopyFrom(make_turns(1))
            submission.header.turns.rewards[0] = 0.5
            submission.header.named_rewards["style"] = 0.25
            await self.submit(submission)


@pytest.fixture(scope="module")
def trained(model_folder: Path) -> StepResult:
    """One real step with a reference and a critic."""
    kl = {"coefficient": 0.1}
    algorithm = type(gae()).model_validate({**gae().model_dump(), "kl": kl})
    policy, _, trainer = make_trainer(model_folder, algorithm=algorithm)
    return trainer.train_step(make_batch(policy), 1e-3)


async def logged(tmp_path: Path, trained: StepResult) -> Names:
    heldout = write_tasks(tmp_path / "heldout.json", 3, prefix="heldout")
    attempts = {"tasks": str(heldout), "attempts": 2}
    sets = [{"name": name, **attempts} for name in ("heldout", "greedy")]
    names = Names()
    await run_with(
        tmp_path,
        names,
        ranks=ReportingRanks(tmp_path / "weights", trained),
        worker=ReportingWorker,
        max_tries=1,
        checkpoint={"every": 1},
        eval={"sets": sets},
    )
    return names


class ShownTracker(Names):
    """A tracker with a page of the run."""

    def open_run(self, run: TrackedRun) -> str:
        return f"https://tracker.example/{run.tracker_id}"


async def test_heartbeats_carry_the_page_of_the_run(tmp_path: Path) -> None:
    sent: list[ReplicaStatus] = []
    await run_with(tmp_path, ShownTracker(), reported={}, statuses=sent, steps=1)
    assert sent[-1].tracker_url.startswith("https://tracker.example/")
    assert len(sent[-1].tracker_url) > len("https://tracker.example/")


async def test_a_full_step_logs_every_documented_name_and_no_other(
    tmp_path: Path, trained: StepResult
) -> None:
    names = await logged(tmp_path, trained)
    for found, (start, end) in (
        (names.metrics, (NAMES, TINKER)),
        (names.histograms, (HISTOGRAMS, "## Alarms")),
    ):
        patterns = {name: pattern(name) for name in documented(start, end)}
        assert patterns
        unknown = [n for n in found if not any(p.fullmatch(n) for p in patterns.values())]
        assert not sorted(unknown), "not in docs/metrics.md"
        missing = [n for n, p in patterns.items() if not any(p.fullmatch(f) for f in found)]
        assert not missing, "in docs/metrics.md and never logged"


def test_every_alarm_is_documented() -> None:
    text = DOCS.read_text()
    table = text[text.index("| alarm |") :]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    reported = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    sources = [
        Path(str(module.__file__)).read_text()
        for module in (event_rules, learning_rules, task_rules)
    ]
    raised = {name for source in sources for name in re.findall(r'Verdict\(\s+"(\w+)"', source)}
    assert raised <= reported
    assert reported - raised == {
        event_rules.NO_PROGRESS,
        *(kind for kind in FailureKind if kind.spoils_group),
        *("damaged_checkpoint", "checkpoint_failed", "corrupt_record", "damaged_mark"),
        *("lost_with_disk", "lost_metrics"),
        # Of the gateway.
        alarms.LATE_HEARTBEATS,
        alarms.REFUSED_KEY,
        tool_drift.TOOLS_CHANGED,
        tool_drift.VERSION_CHANGED,
        # Of a rollout at a Tinker service.
        service_alarm.SERVICE_AWAY,
    }
