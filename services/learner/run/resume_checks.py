"""Checks that a learner which resumes a run has what the run began with."""

import hashlib
import json
from collections.abc import Sequence

from services.common.errors import ConfigError
from services.common.fingerprint import TokenizerDigests
from services.common.log import get_logger
from services.common.spec import PolicyConfig
from services.learner.config.learner import LearnerConfig
from services.learner.groups.policy_history import PolicyLineage
from services.learner.journal.curriculum_tables import drawn_tasks
from services.learner.journal.store import Journal
from services.learner.ports import Ranks
from services.learner.sampling.tasks import Task
from services.learner.types import ModelInfo

_KEY = "began_with"
_log = get_logger(__name__)


async def check_tokenizer_is_the_same(journal: Journal, digests: TokenizerDigests) -> None:
    """Check the tokenizer: token ids in the journal mean nothing under another one.

    Raises ConfigError."""
    digest = digests.whole.hex()
    began = await _initial_value(journal, "tokenizer", digest)
    if began != digest:
        raise ConfigError(
            "policy.model: its tokenizer is not the one that this run began with, so what was"
            " sampled cannot be trained on: restore tokenizer.json and the chat template, or start"
            " a new run"
        )


async def check_publications_are_alike(journal: Journal, policy: PolicyConfig) -> None:
    """Check that the run publishes what it began to: fingerprints of adapters alone and of merged
    weights tell nothing of each other. Raises ConfigError."""
    began = await _initial_value(journal, "adapter_rank", policy.adapter_rank or 0)
    if began != (policy.adapter_rank or 0):
        was = f"set it to {began}" if began else "leave it out"
        raise ConfigError(
            f"policy.adapter_rank: {policy.adapter_rank}, and the run was begun with another:"
            f" {was}, or start a new run"
        )


async def check_tasks_are_the_same(
    journal: Journal, tasks: Sequence[Task], config: LearnerConfig, seed: int
) -> None:
    """Check the tasks: their order depends on those that are used, the seed and the mixture.

    `tasks` are what `learner.select` leaves of the file. Differing tasks are used from here on,
    with a warning. Raises ConfigError when a task that the run has begun is gone."""
    text = "".join(f"{task.key}\n{task.json}\n" for task in tasks)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if await _initial_value(journal, "seed", seed) != seed:
        _log.error("seed differs from the one that the run began with: tasks come in another order")
    order = json.dumps([config.groups_per_step, config.sampling.model_dump(mode="json")])
    if await _initial_value(journal, "order", order) != order:
        _log.warning(
            "learner.sampling or groups_per_step differs from what the run began with: tasks come"
            " in another order from here on; what was quarantined stays so"
        )
    if await _initial_value(journal, "tasks", digest) == digest:
        return
    gone = sorted(await journal.run_read(drawn_tasks) - {task.key for task in tasks})
    if gone:
        raise ConfigError(
            f"learner.tasks: {config.tasks}, with learner.select, is not what this run began with:"
            f" {len(gone)} tasks that the run has sampled are gone, {gone[0]!r} first; restore the"
            " file and the selection, or start a new run"
        )
    _log.error(
        "learner.tasks, with learner.select, is not what the run began with: these tasks are used"
        " from here on",
        path=config.tasks,
    )


async def check_weights_are_the_same(lineage: PolicyLineage, ranks: Ranks, info: ModelInfo) -> None:
    """Check policy.model's weights: they matter without a checkpoint, and to a KL penalty.

    Raises ConfigError when they are not what the run published first."""
    known = lineage.fingerprints_of(0)
    if not known:
        return
    changed = "policy.model: its weights are not those that this run began with, and "
    remedy = ": restore them, or start a new run"
    if info.step == 0 and (await ranks.publish_weights(0)).fingerprint not in known:
        raise ConfigError(f"{changed}the run has no checkpoint yet{remedy}")
    if info.reference is not None and info.reference not in known:
        raise ConfigError(f"{changed}its KL penalty or its adapters build on them{remedy}")


async def _initial_value(journal: Journal, name: str, value: str | int) -> str | int:
    """Return the value that the run began with; `value` if it begins now."""
    began = (await journal.read_meta()).get(_KEY, {})
    if name not in began:
        await journal.set_meta({_KEY: {**began, name: value}})
    return began.get(name, value)
