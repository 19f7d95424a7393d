"""Checks that a resumed run still has the inputs it started with."""

import asyncio
import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from flotilla_common.process.own_version import own_version
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.run_folder.journal_file import BEGAN_WITH
from flotilla_common.run_folder.metric_lines import count_damaged_lines, find_lost_metrics
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.tasks.data_manifest import read_data_manifest
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.config.learner import LearnerConfig
from flotilla_learner.groups.policy_history import PolicyLineage
from flotilla_learner.journal.checkpoint_tables import evaluated_versions
from flotilla_learner.journal.curriculum_tables import drawn_tasks
from flotilla_learner.journal.store import Journal
from flotilla_learner.ports import Ranks
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.sampling.tasks import Task
from flotilla_learner.types import ModelInfo

# A value that JSON can hold.
V = TypeVar("V")

# Key in the journal's meta: the Flotillas that have written it, in order.
_WRITERS = "written_by"
# Keys in the journal's meta: how much of the files of metrics and alarms was reported as lost.
_LOST_METRICS, _LOST_ALARMS = "lost_metrics", "lost_alarms"
_log = get_logger(__name__)


async def check_tokenizer_is_the_same(journal: Journal, digests: TokenizerDigests) -> None:
    """Check the tokenizer: token ids in the journal are meaningless under another one.

    Raises ConfigError."""
    digest = digests.whole.hex()
    began = await _initial_value(journal, "tokenizer", digest)
    if began != digest:
        raise ConfigError(
            "policy.model: its tokenizer is not the one that this run started with, so its"
            " samples cannot be trained on: restore tokenizer.json and the chat template, or start"
            " a new run"
        )


async def check_engine_is_the_same(journal: Journal, engine: str) -> None:
    """Check that the same kind of engine trains as before: neither reads the other's checkpoints.
    Raises ConfigError."""
    began = await _initial_value(journal, "engine", engine)
    if began != engine:
        raise ConfigError(
            f"learner.engine: {engine!r}, but the run started with {began!r}: set it to that, or"
            " start a new run"
        )


async def check_publications_are_alike(journal: Journal, policy: PolicyConfig) -> None:
    """Check that the run publishes the same kind of weights: fingerprints of adapters and of
    merged weights are not comparable. Raises ConfigError."""
    began = await _initial_value(journal, "adapter_rank", policy.adapter_rank or 0)
    if began != (policy.adapter_rank or 0):
        was = f"set it to {began}" if began else "leave it out"
        raise ConfigError(
            f"policy.adapter_rank: {policy.adapter_rank}, but the run started with another rank:"
            f" {was}, or start a new run"
        )


async def check_tasks_are_the_same(
    journal: Journal, tasks: Sequence[Task], config: LearnerConfig, seed: int
) -> None:
    """Check the tasks: their order depends on the set of tasks, the seed and the mixture.

    `tasks` is what `learner.select` leaves of the file. If they differ, the run continues with
    them and logs an error. Raises ConfigError if a task that the run has sampled is gone."""
    text = "".join(f"{task.key}\n{task.json}\n" for task in tasks)
    digest = hashlib.sha256(text.encode()).hexdigest()
    if await _initial_value(journal, "seed", seed) != seed:
        _log.error("seed differs from the one that the run started with: task order changes")
    order = json.dumps([config.groups_per_step, config.sampling.model_dump(mode="json")])
    if await _initial_value(journal, "order", order) != order:
        _log.warning(
            "learner.sampling or groups_per_step differs from what the run started with: task order"
            " changes from here on; quarantined tasks stay quarantined"
        )
    if await _initial_value(journal, "tasks", digest) == digest:
        return
    await _check_no_sampled_task_is_gone(journal, tasks, config.tasks)
    _log.error(
        "learner.tasks, with learner.select, is not what the run started with: the run continues"
        " with these tasks",
        path=config.tasks,
    )


async def check_data_are_the_same(journal: Journal, path: str | None) -> None:
    """Note the prepared data with which the run starts, at the manifest `path`; a resumed run that
    names others is refused. Raises ConfigError."""
    if path is None:
        if "data" in (await journal.read_meta()).get(BEGAN_WITH, {}):
            _log.warning("learner.data was left out: nothing shows that the data are the same")
        return
    manifest = await asyncio.to_thread(read_data_manifest, Path(path))
    tasks = {"train": len(manifest.train), "eval": len(manifest.eval)}
    now = {"sha256": manifest.sha256, "source": dict(manifest.source), "tasks": tasks}
    began = await _initial_value(journal, "data", now)
    if began["sha256"] != now["sha256"]:
        raise ConfigError(
            f"learner.data: {path} ({_describe_data(now)}) is not the manifest that this run"
            f" started with ({_describe_data(began)}): name that one again, or start a new run"
        )


def _describe_data(data: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{count} to {part}" for part, count in data["tasks"].items())
    source = ", ".join(f"{key} {value}" for key, value in data["source"].items() if value)
    return f"{counts}; {source}"


async def check_eval_sets_are_the_same(journal: Journal, sets: Sequence[EvalSet]) -> None:
    """Check the evaluation sets, so that a run's results are those of the same tasks. If they
    differ, the run continues with them and logs an error."""
    for chosen in sets:
        name = chosen.config.name
        now = {task.key: _short_digest(task.json) for task in chosen.tasks}
        began: dict[str, str] = await _initial_value(journal, f"eval_set/{name}", now)
        # Mappings are equal in any order.
        if list(began.items()) == list(now.items()):
            continue
        _log.error(
            "an evaluation set is not what the run started with: earlier results of it are not"
            " comparable"
            if began != now
            else "the tasks of an evaluation set are in another order than the run started with:"
            " they are sampled with other seeds",
            set=name,
            path=chosen.config.tasks,
            gone=len(began.keys() - now.keys()),
            new=len(now.keys() - began.keys()),
            changed=sum(began[key] != now[key] for key in began.keys() & now.keys()),
        )


def _short_digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


async def _check_no_sampled_task_is_gone(
    journal: Journal, tasks: Sequence[Task], path: str
) -> None:
    gone = sorted(await journal.run_read(drawn_tasks) - {task.key for task in tasks})
    if gone:
        raise ConfigError(
            f"learner.tasks: {path}, with learner.select, is not what this run started"
            f" with: {len(gone)} tasks that the run has sampled are gone, {gone[0]!r} first;"
            " restore the file and the selection, or start a new run"
        )


async def check_weights_are_the_same(lineage: PolicyLineage, ranks: Ranks, info: ModelInfo) -> None:
    """Check policy.model's weights, which matter without a checkpoint and for a KL penalty.

    Raises ConfigError if they differ from the run's first publication."""
    known = lineage.fingerprints_of(0)
    if not known:
        return
    changed = "policy.model: its weights are not those that this run started with, and "
    remedy = ": restore them, or start a new run"
    if info.step == 0 and (await ranks.publish_weights(0)).fingerprint not in known:
        raise ConfigError(f"{changed}the run has no checkpoint yet{remedy}")
    if info.reference is not None and info.reference not in known:
        raise ConfigError(f"{changed}its KL penalty or its adapters depend on them{remedy}")


async def check_base_is_the_same(journal: Journal, info: ModelInfo) -> None:
    """Check the weights that stay in use beside those that are trained, such as the base of
    adapters, in a run that has published none that they could be compared with. Raises
    ConfigError."""
    if info.reference is None:
        return
    digest = info.reference.hex()
    if await _initial_value(journal, "base", digest) != digest:
        raise ConfigError(
            "policy.model: its weights are not those that this run started with, and its KL penalty"
            " or its adapters depend on them: restore them, or start a new run"
        )


async def check_demonstrations_are_the_same(journal: Journal, now: Mapping[str, Any]) -> None:
    """Check everything that decides which sequences each step imitates: `now` holds it by key, and
    nothing if none does. Raises ConfigError, because steps that are trained again would be
    others."""
    began = await _initial_value(journal, "demonstrations", dict(now))
    keys = began.keys() | now.keys()
    if differing := sorted(key for key in keys if began.get(key) != now.get(key)):
        was = ", ".join(f"{key} was {began.get(key)}" for key in differing)
        raise ConfigError(
            f"{differing[0]}: the demonstrations of each step are not those that this run started"
            f" with: {was}; restore that, or start a new run"
        )


async def note_writer(journal: Journal) -> None:
    """Note which Flotilla writes the journal from here on; another one than before is no obstacle,
    because the journal's format is checked."""
    known = (await journal.read_meta()).get(_WRITERS, [])
    now = own_version().to_dict()
    if known and known[-1] != now:
        _log.warning("the run goes on under another flotilla", was=known[-1], now=now)
    if known[-1:] != [now]:
        await journal.set_meta({_WRITERS: [*known, now]})


async def report_lost_metrics(journal: Journal, path: Path) -> None:
    """Report, once, that the metrics file lacks what the run has logged: the run continues, but its
    curves have a gap."""
    logged = (await journal.read_meta()).get("tracker", {}).get("step", 0)
    evaluated = await journal.run_read(evaluated_versions)
    lost = await asyncio.to_thread(find_lost_metrics, path, logged, evaluated)
    text = (
        f"the metrics file lacks {len(lost.steps)} of {logged} logged steps and"
        f" {len(lost.evaluations)} of {len(evaluated)} evaluations, and has {lost.damaged}"
        " damaged lines"
    )
    await _report_more(journal, _LOST_METRICS, lost.count, text, path)


async def report_damaged_alarms(journal: Journal, path: Path) -> None:
    """Report, once, that the alarms file has damaged lines."""
    damaged = await asyncio.to_thread(count_damaged_lines, path)
    text = f"the alarms file has {damaged} damaged lines"
    await _report_more(journal, _LOST_ALARMS, damaged, text, path)


async def _report_more(journal: Journal, key: str, count: int, text: str, path: Path) -> None:
    """Report a loss of lines if it has grown since the start that noted it under this key."""
    known = (await journal.read_meta()).get(key, 0)
    if count > known:
        journal.incidents.report_incident("lost_metrics", text, path)
    if count != known:
        await journal.set_meta({key: count})


async def _initial_value(journal: Journal, name: str, value: V) -> V:
    """Return the value that the run started with; `value` if this is its first start."""
    began = (await journal.read_meta()).get(BEGAN_WITH, {})
    if name not in began:
        await journal.set_meta({BEGAN_WITH: {**began, name: value}})
    return began.get(name, value)
