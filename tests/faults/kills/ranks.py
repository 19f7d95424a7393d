"""One training rank inside the learner's own process: real torch, real checkpoints, no start-up.

`kill -9` of the process so hits the training step and every write of a checkpoint too.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import torch

from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.algorithm import AlgorithmConfig
from flotilla_learner.config.learner import OptimizerConfig
from flotilla_learner.config.rank import RankConfig
from flotilla_learner.rank import checkpoint as files
from flotilla_learner.rank.checkpoint_writer import CheckpointWriter
from flotilla_learner.rank.optimizer import Optimizer
from flotilla_learner.rank.policy_loading import load_policy
from flotilla_learner.rank.split_loading import MODEL
from flotilla_learner.rank.trainer import Trainer
from flotilla_learner.types import CheckpointFiles, ModelInfo, StepResult, TrainBatch
from tests.support.fake_ranks import FakeRanks

LR = 1e-2
RANK = RankConfig(pack_tokens=64, head_chunk=16)


class SmallRanks(FakeRanks):
    """Trains the model of `policy`; what it publishes is a digest of the parameters.

    `before` is called with the name of each moment at which a process may be killed.
    """

    def __init__(
        self,
        folder: Path,
        policy: PolicyConfig,
        before: Callable[[str], None] = lambda name: None,
    ) -> None:
        super().__init__(folder, before=before)
        self._config = policy
        self._moment = before

    async def start_ranks(self, checkpoint: Path | None) -> ModelInfo:
        torch.set_num_threads(1)
        self._moment("start")
        self.step = files.read_step(checkpoint) if checkpoint else 0
        policy = load_policy(self._config, RANK, checkpoint)
        self._policy = policy
        self._optimizer = Optimizer(policy.named_parameters(), OptimizerConfig(lr=LR))
        if checkpoint:
            files.load_optimizer(checkpoint, self._optimizer)
        self._writer = CheckpointWriter(0, policy.device, self._describe)
        self._trainer = Trainer(policy, self._optimizer, AlgorithmConfig(), RANK)
        self._summarise()
        count = sum(p.numel() for p in policy.named_parameters().values())
        return ModelInfo(count, policy.head.shape[0], self.step)

    async def train_step(self, batch: TrainBatch) -> StepResult:
        assert batch.step == self.step + 1
        self._moment("train")
        self._trainer.train_step(batch, LR)
        self.step = batch.step
        self._summarise()
        self._moment("trained")
        return StepResult({"policy/loss": 0.0}, 0.0, skipped=False)

    async def begin_checkpoint(self, directory: Path) -> Awaitable[CheckpointFiles]:
        self._moment("save")
        policy = self._policy
        groups = {
            MODEL: policy.named_parameters(),
            files.OPTIMIZER: self._optimizer.state_tensors(),
        }
        self._writer.begin_writing(directory, groups, self.step)
        return asyncio.wrap_future(self._writer.when_written(self._note_saved))

    def _describe(self, directory: Path) -> list[str]:
        self._policy.config.save_pretrained(directory)
        return [files.CONFIG_FILE]

    def _note_saved(self, saved: CheckpointFiles) -> CheckpointFiles:
        self._moment("saved")
        return saved

    def _summarise(self) -> None:
        digest = hashlib.shake_256()
        for _, parameter in sorted(self._policy.named_parameters().items()):
            digest.update(parameter.detach().numpy().tobytes())
        self.parameters = np.frombuffer(digest.digest(self.parameters.nbytes), np.uint64)
