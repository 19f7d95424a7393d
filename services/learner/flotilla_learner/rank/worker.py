"""Commands of a rank: start and train; for the first rank also host, publish, compare and save.

`serve` starts a `ServingRank` in place of one that makes a run's steps."""

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError

from flotilla_common.process.process_memory import peak_memory_bytes
from flotilla_learner.rank.burn_in import BurnIn
from flotilla_learner.rank.checkpoint_writer import CheckpointWriter
from flotilla_learner.rank.compare_command import CompareCommand
from flotilla_learner.rank.learning_rate import learning_rate
from flotilla_learner.rank.model import score_canary
from flotilla_learner.rank.rank_setup import RankModels, RankSetup, load_models
from flotilla_learner.rank.rendezvous_store import Store, host_store
from flotilla_learner.rank.serving_rank import ServingRank, ServingSetup, load_served
from flotilla_learner.rank.weight_slots import WeightSlots
from flotilla_learner.ranks import protocol
from flotilla_learner.types import ModelInfo, Publication, StepTokens, TrainBatch

# The process's output is the rank's log.
_log = logging.getLogger(__name__)

# A future is answered when it completes; other commands are served meanwhile.
CommandResult = protocol.Message | Future[protocol.Message]
Command = Callable[[protocol.Message], CommandResult]


class OutOfOrderError(Exception):
    """The requested step or publication is not the next one."""


class Rank:
    """One training rank. Commands come one at a time, and each step exactly once."""

    def __init__(self, setup: RankSetup, models: RankModels) -> None:
        self._setup = setup
        self._models = models
        self._step = models.step

    @property
    def commands(self) -> Mapping[str, Command]:
        """Commands by name; each takes the message's arguments."""
        return {"train": self.train_step, "score": self.score_batch, "burn_in": self.burn_in}

    def model_info(self) -> ModelInfo:
        policy = self._models.policy
        count = sum(parameter.numel() for parameter in policy.named_parameters().values())
        fingerprint = self._models.initial_fingerprint()
        experts = policy.routing.shape if policy.routing is not None else None
        banned = () if policy.vision is None else policy.vision.family.banned_ids
        return ModelInfo(count, policy.vocabulary, self._step, fingerprint, experts, banned)

    def describe_start(self) -> protocol.Message:
        """Describe the loaded model, the peak memory of loading it here, and the reason if its
        blocks are not compiled although they should be."""
        device, compiled = self._models.policy.device, self._models.policy.compiled
        cuda = device.type == "cuda"
        memory = {
            "host": peak_memory_bytes(),
            "device": torch.cuda.max_memory_reserved(device) if cuda else 0,
        }
        why = None if compiled is None else compiled.why_not
        return {
            **protocol.encode_model_info(self.model_info()),
            "memory": memory,
            "uncompiled": why,
        }

    def burn_in(self, _: protocol.Message) -> protocol.Message:
        """Try the longest pack; see `BurnIn`."""
        models, setup = self._models, self._setup
        trial = BurnIn(models.policy, models.critic, models.optimizer, setup.algorithm, setup.rank)
        return asdict(trial.run(setup.policy.max_model_len))

    def train_step(self, message: protocol.Message) -> protocol.Message:
        """Run the next step with the batch that the message describes.

        Raises OutOfOrderError if its step is not the one after the parameters'."""
        batch = self._receive_batch(message)
        if batch.step != self._step + 1:
            raise OutOfOrderError(f"step {batch.step} requested, but the next is {self._step + 1}")
        setup, models = self._setup, self._models
        if setup.warm.count and batch.step == setup.warm.count + 1:
            # A function of the step's number: a start that resumes here does the same.
            models.begin_algorithm()
        lr = learning_rate(setup.optimizer, batch.step, setup.total_steps, setup.warm)
        result = models.trainer_of(batch).train_step(batch, lr)
        self._step = batch.step
        if message.get("keep_tokens") and self._setup.place.index == 0 and result.tokens:
            result = replace(result, token_file=self._hand_out_tokens(batch.step, result.tokens))
        return protocol.encode_step_result(result)

    def score_batch(self, message: protocol.Message) -> protocol.Message:
        """Score the batch that the message describes; see `ports.Ranks`."""
        batch = self._receive_batch(message)
        return asdict(self._models.trainer_of(batch).score_batch(batch))

    def _receive_batch(self, message: protocol.Message) -> TrainBatch:
        """Return the batch that the service has written into shared memory.

        If ranks are on several machines, the first one reads it and broadcasts it to all others,
        whose messages are empty."""
        if not self._setup.place.spans_machines:
            return protocol.read_batch(message)
        replicas = self._models.replicas
        packed = protocol.pack_batch(message) if replicas.index == 0 else None
        return protocol.unpack_batch(replicas.broadcast_bytes(packed))

    def _hand_out_tokens(self, step: int, tokens: StepTokens) -> Path | None:
        """Write the step's values for the service; return None if there is no room."""
        path = protocol.token_path(self._setup.shm_dir, self._setup.name, step)
        try:
            protocol.write_tokens(path, tokens)
        except (OSError, SafetensorError) as error:
            path.unlink(missing_ok=True)
            _log.warning("step %d: its token values are lost: %s", step, error)
            return None
        return path

    def close(self) -> None:
        """Remove what the rank holds in shared memory."""


class PublishingRank(Rank):
    """A rank that takes part in operations on all parameters."""

    def __init__(self, setup: RankSetup, models: RankModels, *, own_slots: bool = True) -> None:
        super().__init__(setup, models)
        policy = models.policy
        self._slots = WeightSlots(
            policy.published_parameters(),
            policy.compute_dtype,
            setup.shm_dir,
            setup.name,
            own=own_slots,
            merge=policy.published_tensor,
            marks=models.publication_marks,
        )
        self._comparing = CompareCommand(policy, self._slots, setup.policy, setup.rank)
        index, saved = setup.place.index, models.saved
        self._saving = CheckpointWriter(index, policy.device, saved.describe, saved.record)

    @property
    def commands(self) -> Mapping[str, Command]:
        return {**super().commands, "save": self.save_checkpoint, "saved": self.finish_checkpoint}

    def save_checkpoint(self, message: protocol.Message) -> protocol.Message:
        """Copy this rank's part of a checkpoint, and start writing it."""
        self._saving.begin_writing(Path(message["directory"]), self._models.state, self._step)
        return {}

    def finish_checkpoint(self, _: protocol.Message) -> Future[protocol.Message]:
        """Return a future that completes when this rank's part of the checkpoint is written."""
        return self._saving.when_written(partial(protocol.CHECKPOINT.dump_python, mode="json"))


class FirstRank(PublishingRank):
    """The rank that speaks for all: they hold the same parameters."""

    @property
    def commands(self) -> Mapping[str, Command]:
        return {
            **super().commands,
            "publish": self.publish_weights,
            "compare": self.compare_batch,
        }

    def publish_weights(self, message: protocol.Message) -> protocol.Message:
        """Write the weights and score the canary.

        Raises OutOfOrderError if the version is not the number of steps behind the weights."""
        version, policy = message["version"], self._models.policy
        if version != self._step:
            raise OutOfOrderError(f"version {version} requested, but the weights are {self._step}")
        path, fingerprint, manifest = self._slots.write_version(version)
        canary = score_canary(policy, self._setup.rank.head_chunk)
        size = self._slots.total_bytes
        published = Publication(
            *(version, fingerprint, manifest, size, path),
            *(canary.token_ids, canary.logprobs, canary.pictures),
        )
        return protocol.encode_publication(published)

    def compare_batch(self, message: protocol.Message) -> protocol.Message:
        """Score a batch again and change nothing; see `ports.Ranks`."""
        batch = protocol.read_batch(message)
        found = self._comparing.run_comparison(batch, self._step, diagnose=message["diagnose"])
        return protocol.COMPARISON.dump_python(found, mode="json")

    def close(self) -> None:
        self._slots.unlink_slots()


class JoiningRank(PublishingRank):
    """A rank with a part of the parameters that the first one needs for the whole."""

    def __init__(self, setup: RankSetup, models: RankModels) -> None:
        super().__init__(setup, models, own_slots=False)

    @property
    def commands(self) -> Mapping[str, Command]:
        """See `Rank.commands`; only the first rank's answers count."""
        return {
            **super().commands,
            "publish": self.join_publication,
            "compare": self.join_comparison,
        }

    def join_publication(self, message: protocol.Message) -> protocol.Message:
        """Take part in `FirstRank.publish_weights`."""
        self._slots.join_version(message["version"])
        score_canary(self._models.policy, self._setup.rank.head_chunk)
        return {}

    def join_comparison(self, message: protocol.Message) -> protocol.Message:
        """Take part in `FirstRank.compare_batch`."""
        batch = protocol.read_batch(message)
        self._comparing.run_comparison(batch, self._step, diagnose=message["diagnose"])
        return {}


class CommandDispatcher:
    """Answers messages; holds the rank from `start` on."""

    def __init__(self) -> None:
        self._rank: Rank | ServingRank | None = None
        self._store: Store | None = None

    def close(self) -> None:
        """Remove what the rank holds in shared memory."""
        if self._rank is not None:
            self._rank.close()

    def answer_command(self, message: protocol.Message) -> CommandResult:
        """Return the result of one command; raise whatever the command raises."""
        if message["command"] == "host":
            self._store, rendezvous = host_store(message["arguments"]["host"])
            return {"rendezvous": rendezvous}
        if message["command"] == "serve":
            setup = ServingSetup.model_validate(message["arguments"])
            self._rank = ServingRank(setup, load_served(setup))
            return self._rank.describe_start()
        if message["command"] == "start":
            self._rank = _start_rank(RankSetup.model_validate(message["arguments"]), self._store)
            return self._rank.describe_start()
        if self._rank is None:
            raise OutOfOrderError(f"{message['command']} before start")
        return self._rank.commands[message["command"]](message["arguments"])


def _start_rank(setup: RankSetup, store: Store | None) -> Rank:
    models = load_models(setup, store)
    if setup.place.index == 0:
        return FirstRank(setup, models)
    joins = models.policy.is_split and setup.place.index < setup.place.slots
    return JoiningRank(setup, models) if joins else Rank(setup, models)
