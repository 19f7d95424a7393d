"""kill -9 of a learner in a warm start, at its end and after it: nothing is lost or trained twice,
and the parameters are those of ranks that run all of its plans undisturbed."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from flotilla_common.weights.fingerprint import tokenizer_digest
from tests.faults.harness import GATEWAY, HELDOUT, LEARNER, RANK, ROLLOUT, FaultRun
from tests.faults.replay import replayed
from tests.support.checkpoints import saved_state
from tests.support.demonstrations import make_demonstrations, write_file
from tests.support.tiny_ranks import same_bits

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
NewRun = Callable[..., FaultRun]
WARM, STEPS = 40, 3


@pytest.fixture
def warm_run(new_run: NewRun, policy: Path, tmp_path: Path) -> NewRun:
    """Makes a run of more imitated steps than are over before a kill, with a penalty that measures
    from what they end with."""
    path = write_file(
        tmp_path / "demonstrations.npz", make_demonstrations(30), tokenizer_digest(policy)
    )
    warm = {"data": str(path), "sequences_per_step": 4, "steps": WARM, "heldout": 0.2}
    learner = {
        "warm_start": warm,
        "steps": STEPS,
        "algorithm": {"kl": {"coefficient": 0.01}},
        "checkpoint": {"every": 7},
    }
    return lambda **changes: new_run(learner={**learner, **changes})


def logged(run: FaultRun, name: str) -> list[int]:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    points = [json.loads(line) for line in lines]
    return [point["step"] for point in points if name in point]


async def test_a_learner_killed_in_both_phases_and_between_them_ends_as_if_it_had_never_been(
    warm_run: NewRun, tmp_path: Path
) -> None:
    run = warm_run()
    await run.train()
    await run.step(1)
    run.keep_payloads()
    # In the warm start, as soon as its last step is planned, and after it.
    for step in (WARM // 3, WARM, WARM + 1):
        await run.step(step)
        before = run.processes(LEARNER)
        run.kill(LEARNER, RANK)
        assert step > WARM or run.steps() <= WARM + 1
        await run.restarted(LEARNER, before)
    await run.completes()

    await run.gone(10.0)
    run.check_books(WARM + STEPS)
    assert run.query("SELECT count(*) FROM epochs") == [(4,)]
    attempts = run.query("SELECT step, json_array_length(attempts) FROM plans ORDER BY step")
    assert [step for step, count in attempts if not count] == list(range(1, WARM + 1))
    versions = run.query("SELECT DISTINCT version FROM publications ORDER BY version")
    assert versions == [(version,) for version in (0, *range(WARM, WARM + STEPS + 1))]
    one_each = (
        "SELECT version FROM publications GROUP BY version HAVING count(DISTINCT fingerprint) > 1"
    )
    assert run.query(one_each) == [], "a replay made other weights"
    moments = run.query("SELECT moment, version FROM evals ORDER BY version")
    assert moments == [("before", 0), ("during", WARM), ("after", WARM + STEPS)]
    assert logged(run, "sft/loss") == list(range(1, WARM + 1))
    assert logged(run, "policy/kl") == list(range(WARM + 1, WARM + STEPS + 1))
    final = saved_state(run.folder / "checkpoints" / f"step-{WARM + STEPS:06d}")
    assert same_bits(final, saved_state(await replayed(run, tmp_path)))


async def test_a_warm_start_stopped_by_a_person_goes_on_and_samples_only_at_its_end(
    warm_run: NewRun, tasks: Path
) -> None:
    heldout = {"name": "heldout", "tasks": str(tasks.with_name(HELDOUT)), "when": ["after"]}
    run = warm_run(eval={"sets": [heldout]})
    await run.train()
    await run.step(5)
    assert not run.processes(ROLLOUT) and not run.processes(GATEWAY)
    assert "run running" in run.output
    run.interrupt()
    assert await run.exit() == 130, run.state()
    stopped = run.steps()
    assert 0 < stopped < WARM
    assert not any(run.folder.glob("logs/rollout*")), "a rollout was started"
    await run.train("--resume")
    await run.completes()
    assert any(run.folder.glob("logs/rollout*"))
    assert run.query("SELECT moment, version FROM evals") == [("after", WARM + STEPS)]
    assert run.query("SELECT min(version) FROM publications") == [(WARM,)]
    run.check_books(WARM + STEPS)
    assert logged(run, "sft/loss") == list(range(1, WARM + 1))
