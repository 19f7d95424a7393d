"""What a run imitates: the sequences of a file of demonstrations, trained and held out."""

import hashlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flotilla_common.episodes.demonstrations import (
    Demonstration,
    DemonstrationHead,
    DemonstrationsError,
    read_demonstrations,
)
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import SharedConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_common.weights.fingerprint import TokenizerDigests
from flotilla_learner.config.imitation import ImitationConfig, WarmStartConfig
from flotilla_learner.sampling.eval_sets import EvalSet
from flotilla_learner.types import TrainBatch, TrainSequence

_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class DemonstrationSet:
    """Sequences that a run trains on, and those that it only scores, of the file at `path`, none
    with more than `longest` tokens. `origin` is everything that decides which they are and which
    steps train on them, by key; the file's own is `key`."""

    path: str
    sha256: str
    longest: int
    trained: tuple[Demonstration, ...]
    heldout: tuple[Demonstration, ...]
    origin: dict[str, Any]
    key: str

    def check_vocabulary(self, size: int) -> None:
        """Raise ConfigError for ids that the model does not have."""
        largest = max(int(each.token_ids.max()) for each in (*self.trained, *self.heldout))
        if largest >= size:
            raise ConfigError(
                f"{self.key}: it has token id {largest}, but policy.model has only {size}; use"
                " demonstrations of this model"
            )


def load_demonstrations(
    config: ImitationConfig, shared: SharedConfig, tokenizer: TokenizerDigests
) -> DemonstrationSet:
    """Load what a run imitates. Raises ConfigError, also for ids of another tokenizer."""
    key = f"{config.table}.data"
    try:
        file = read_demonstrations(Path(config.data))
    except DemonstrationsError as error:
        raise ConfigError(f"{key}: {error}") from error
    _check_tokenizer(key, config.data, file.head, tokenizer)
    longest = shared.policy.max_model_len
    fitting = _fit(file.sequences, longest, cut=config.too_long == "cut")
    trained, heldout = _hold_out(fitting, config, shared.seed)
    if len(trained) < config.sequences_per_step:
        raise ConfigError(
            f"{config.table}.sequences_per_step: {config.sequences_per_step}, but {config.data} has"
            f" only {len(trained)} sequences to train on; lower it, or collect more"
        )
    sizes = {"trained": len(trained), "heldout": len(heldout)}
    tokens = sum(int(each.trained.sum()) for each in trained)
    _log.info("demonstrations", source=file.head.source, trained_tokens=tokens, **sizes)
    names = {"sequences_per_step", "too_long", "heldout"}
    # Steps after those of a warm start train on other things.
    names |= {"steps"} if isinstance(config, WarmStartConfig) else set()
    settings = config.model_dump(include=names)
    origin = {f"{config.table}.{name}": value for name, value in settings.items()}
    also = {key: file.sha256, "policy.max_model_len": longest, "seed": shared.seed}
    return DemonstrationSet(
        *(config.data, file.sha256, longest), trained, heldout, {**also, **origin}, key
    )


def _check_tokenizer(key: str, path: str, head: DemonstrationHead, own: TokenizerDigests) -> None:
    if head.tokenizer != own.whole.hex():
        raise ConfigError(
            f"{key}: {path} has token ids of another tokenizer or chat template"
            f" ({head.tokenizer[:12]}, of {head.source}) than policy.model"
            f" ({own.whole.hex()[:12]}), so they mean something else here; imitate a run of a model"
            " with this tokenizer"
        )


def refuse_imitated_tasks(trained: Iterable[Demonstration], sets: Collection[EvalSet]) -> None:
    """Raise ConfigError if a set has tasks that are imitated: its results would not be those of
    held-out tasks."""
    imitated = {each.task_key for each in trained}
    for chosen in sets:
        if twins := [task.key for task in chosen.tasks if task.key in imitated]:
            raise ConfigError(
                f"learner.eval.sets: {len(twins)} of the {len(chosen.tasks)} tasks of the set"
                f" {chosen.config.name!r} ({chosen.config.tasks}) are also imitated, {twins[0]!r}"
                " first; evaluate tasks of which there are no demonstrations"
            )


def make_batch(step: int, sequences: Iterable[Demonstration]) -> TrainBatch:
    """Return demonstrations as the ranks take them."""
    return TrainBatch(step, tuple(map(_to_train_sequence, sequences)), imitated=True)


def _to_train_sequence(given: Demonstration) -> TrainSequence:
    return TrainSequence(
        group_id=f"{given.source}/{given.key.group_id}",
        attempt_index=given.key.attempt_index,
        reward=given.reward,
        token_ids=given.token_ids,
        policy_mask=given.trained,
        behaviour_logprobs=np.zeros(len(given.token_ids), np.float32),
        temperature=1.0,
        staleness=0,
    )


def _fit(sequences: Sequence[Demonstration], longest: int, *, cut: bool) -> list[Demonstration]:
    """Return the sequences that have tokens to train on within the model's context, and report the
    others."""
    counts: Counter[str] = Counter()
    found: list[Demonstration] = []
    for each in sequences:
        too_long = len(each.token_ids) > longest
        counts["cut" if cut else "dropped"] += too_long
        if too_long and not cut:
            continue
        short = replace(each, token_ids=each.token_ids[:longest], trained=each.trained[:longest])
        if short.trained.any():
            found.append(short)
        else:
            counts["without_trained_tokens"] += 1
    if counts.total():
        _log.warning("demonstrations are left out or cut", longest=longest, **counts)
    return found


def _hold_out(
    sequences: Sequence[Demonstration], config: ImitationConfig, seed: int
) -> tuple[tuple[Demonstration, ...], tuple[Demonstration, ...]]:
    """Return the sequences to train on, and those of whole tasks that have at least the share of
    the episodes to hold out. Raises ConfigError if there is only one task."""
    share = config.heldout
    if share == 0:
        return tuple(sequences), ()
    episodes = {(each.source, each.key): each.task_key for each in sequences}
    sizes = Counter(episodes.values())
    order = sorted(sizes, key=lambda task: hashlib.sha256(f"{seed}/{task}".encode()).digest())
    if len(order) < 2:
        raise ConfigError(
            f"{config.table}.heldout: the demonstrations are all of one task, so none can be held"
            " out; leave it out, or collect demonstrations of other tasks"
        )
    chosen: set[str] = set()
    for task in order[:-1]:
        if sum(sizes[each] for each in chosen) >= share * len(episodes):
            break
        chosen.add(task)
    heldout = tuple(each for each in sequences if each.task_key in chosen)
    return tuple(each for each in sequences if each.task_key not in chosen), heldout
