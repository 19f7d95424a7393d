"""The rollout service with `SmallEngine` as its fake engine: a module for `[launcher.modules]`.

`FLOTILLA_TEST_TASKS` names the task file that the engine knows the answers to,
`FLOTILLA_TEST_ROPE_THETA` the base by which it encodes positions, where it is not the model's, and
`FLOTILLA_TEST_FOLDER` the folder of the policy, where it is another than the learner's.

Like the service itself it checks its configuration where there is no tokenizer.
"""

import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flotilla_common.process.service_main import Runtime, run_service_process
from flotilla_common.wire.registry import load_registry
from flotilla_rollout.__main__ import DOC, load
from flotilla_rollout.config.rollout import RolloutConfig

if TYPE_CHECKING:
    from flotilla_rollout.tokenizer_port import Tokenizer

TURN_S = 0.1
ROPE = "FLOTILLA_TEST_ROPE_THETA"
FOLDER = "FLOTILLA_TEST_FOLDER"


def _load() -> Callable[[Runtime[RolloutConfig]], Awaitable[None]]:
    # The tokenizer does without it, and importing it would take most of a test's time.
    modules: dict[str, Any] = sys.modules
    modules["torch"] = None
    from flotilla_common.adapters import model_hub
    from flotilla_rollout.adapters import fake
    from tests.faults import small_policy
    from tests.faults.small_engine import SmallEngine

    def engine(words: "Tokenizer", turn_end_id: int) -> SmallEngine:
        folder = Path(os.environ["FLOTILLA_TEST_TASKS"]).parent
        return SmallEngine(words, turn_end_id, folder, turn_s=TURN_S)

    setattr(fake, "FakeEngine", engine)  # noqa: B010 - a function replaces a class
    theta = float(os.environ.get(ROPE, small_policy.ROPE_THETA))
    setattr(small_policy, "ROPE_THETA", theta)  # noqa: B010 - it is a constant to everybody else
    if FOLDER in os.environ:
        other = Path(os.environ[FOLDER])
        setattr(model_hub, "stage_model", lambda model, revision: other)  # noqa: B010
    return load()


if __name__ == "__main__":
    run_service_process("rollout", RolloutConfig, _load, doc=DOC, registry=load_registry)
