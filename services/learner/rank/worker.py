"""The rank's commands: start, train, publish, save."""

import time
from collections.abc import Callable
from pathlib import Path

import torch

from services.common.config import Model
from services.common.spec import PolicyConfig
from services.learner.algorithm_config import AlgorithmConfig
from services.learner.config import OptimizerConfig
from services.learner.rank import checkpoint, wire
from services.learner.rank.config import RankConfig
from services.learner.rank.model import Policy, canary_token_ids, load, score
from services.learner.rank.optimizer import Optimizer, learning_rate
from services.learner.rank.publish import WeightSlots
from services.learner.rank.step import Trainer
from services.learner.types import ModelInfo, Publication, StepResult


class Setup(Model):
    """What a rank is told at its start."""

    run_id: str
    shm_dir: Path
    total_steps: int
    policy: PolicyConfig
    algorithm: AlgorithmConfig
    optimizer: OptimizerConfig
    rank: RankConfig
    # A checkpoint folder to continue from.
    checkpoint: Path | None = None


class OutOfOrderError(Exception):
    """A step or publication was asked for that is not the next one."""


class Rank:
    """One training rank. Commands come one at a time, and each step exactly once."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        torch.set_num_threads(setup.rank.threads)
        source = setup.checkpoint
        self._step = checkpoint.read_step(source) if source else 0
        self._policy = load(setup.policy, setup.rank, source)
        self._optimizer = Optimizer(
            self._policy.named_parameters(),
            setup.optimizer,
            offload=setup.rank.offload_optimizer,
        )
        if source:
            checkpoint.load_optimizer(source, self._optimizer)
        self._trainer = Trainer(self._policy, self._optimizer, setup.algorithm, setup.rank)
        self._slots = WeightSlots(
            self._policy.named_parameters(),
            self._policy.compute_dtype,
            setup.shm_dir,
            setup.run_id,
        )

    @property
    def policy(self) -> Policy:
        """The model as it is now."""
        return self._policy

    def info(self) -> ModelInfo:
        """What was loaded."""
        parameters = self._policy.named_parameters().values()
        return ModelInfo(sum(p.numel() for p in parameters), self._policy.head.shape[0], self._step)

    def train(self, message: wire.Message) -> StepResult:
        """Makes the next step with the batch that the message describes.

        Raises OutOfOrderError when its step is not the one after the parameters'.
        """
        batch = wire.read_batch(message)
        Path(message["path"]).unlink()
        if batch.step != self._step + 1:
            raise OutOfOrderError(f"step {batch.step} asked for, the next one is {self._step + 1}")
        started = time.monotonic()
        lr = learning_rate(self._setup.optimizer, batch.step, self._setup.total_steps)
        metrics, skipped = self._trainer.train(batch, lr)
        self._step = batch.step
        return StepResult(metrics, time.monotonic() - started, skipped)

    def publish(self, version: int) -> Publication:
        """Writes the weights and scores the canary.

        Raises OutOfOrderError when `version` is not the number of steps behind the weights.
        """
        if version != self._step:
            raise OutOfOrderError(f"version {version} asked for, the weights are {self._step}")
        path, fingerprint, manifest = self._slots.write(version)
        ids = canary_token_ids(self._policy.head.shape[0])
        logprobs = score(self._policy, ids, chunk=self._setup.rank.head_chunk)
        return Publication(
            version, fingerprint, manifest, self._slots.total_bytes, path, ids, logprobs
        )

    def save(self, directory: Path) -> wire.Message:
        """Writes a checkpoint."""
        files = checkpoint.save(directory, self._policy, self._optimizer, self._step)
        return wire.encode_checkpoint(files)

    def close(self) -> None:
        """Removes what the rank holds in shared memory."""
        self._slots.remove()


class Dispatcher:
    """Answers messages; holds the rank from `start` on."""

    def __init__(self) -> None:
        self._rank: Rank | None = None

    def close(self) -> None:
        """Removes what the rank holds in shared memory."""
        if self._rank is not None:
            self._rank.close()

    def answer(self, message: wire.Message) -> wire.Message:
        """The result of one command. Raises whatever the command raises."""
        if message["command"] == "start":
            self._rank = Rank(Setup.model_validate(message["arguments"]))
            return wire.encode_model_info(self._rank.info())
        if self._rank is None:
            raise OutOfOrderError(f"{message['command']} before start")
        return _commands(self._rank)[message["command"]](message["arguments"])


def _commands(rank: Rank) -> dict[str, Callable[[wire.Message], wire.Message]]:
    return {
        "train": lambda arguments: wire.encode_step_result(rank.train(arguments)),
        "publish": lambda a: wire.encode_publication(rank.publish(a["version"])),
        "save": lambda arguments: rank.save(Path(arguments["directory"])),
    }
