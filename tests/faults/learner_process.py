"""A learner process with fake ranks that kills itself, as `kill -9` would, at a chosen moment.

Run as a module: FOLDER PORT MOMENT COUNT CHANGES. MOMENT is a name that FakeRanks reports, and
the process dies when it comes for the COUNT-th time; `never` lives to the end. CHANGES is JSON for
`make_config`; with a judge, all groups are judged. What the ranks hold in the end goes to
FOLDER/parameters.npy.
"""

import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.app import run_learner
from flotilla_learner.config.judge import JudgeConfig
from flotilla_learner.dependencies import LearnerDependencies
from flotilla_learner.judge.group_judge import GroupJudge, open_group_judge
from flotilla_learner.tracking.adapters.jsonl import JsonlTracker
from tests.faults.killer import Killer
from tests.support.fake_ranks import FakeRanks
from tests.support.learner import TOKENIZER, make_config, make_runtime

STEPS = 6
# In the order of a step.
MOMENTS = ("train", "trained", "publish", "save", "saved")


def learner_words(
    folder: Path,
    port: int,
    moment: str = "never",
    count: int = 1,
    changes: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Return the words of a Python that is such a learner."""
    given = (str(folder), str(port), moment, str(count), json.dumps(changes or {}))
    return ("-m", "tests.faults.learner_process", *given)


def open_judge(config: JudgeConfig) -> GroupJudge:
    """Its client is imported by runs with a judge alone."""
    from flotilla_learner.judge.adapters.chat_judge import ChatJudge

    return open_group_judge(
        ChatJudge(config), config, lambda ids: " ".join(f"w{each}" for each in ids)
    )


async def main(folder: Path, port: int, moment: str, count: int, changes: str) -> None:
    values: dict[str, Any] = {
        "steps": STEPS,
        "max_staleness": 1,
        "lease_ttl_s": 1.0,
        "checkpoint": {"every": 2, "keep": 2},
        **json.loads(changes),
    }
    config = make_config(folder, **values)
    judge = None if config.judge is None else open_judge(config.judge)
    judged = ("env0", "env1", "env2") if judge else ()
    runtime = make_runtime(folder, config, listen=f"127.0.0.1:{port}", judged=judged)
    ranks = FakeRanks(folder / "weights", before=Killer(moment, count))
    tracker = JsonlTracker(folder / "run" / "metrics.jsonl")
    vendors = LearnerDependencies(ranks, tracker, TokenizerDigests(TOKENIZER), judge=judge)
    await run_learner(runtime, vendors)
    tracker.close()
    np.save(folder / "parameters.npy", ranks.parameters)


if __name__ == "__main__":
    _, folder, port, moment, count, changes = sys.argv
    asyncio.run(main(Path(folder), int(port), moment, int(count), changes))
