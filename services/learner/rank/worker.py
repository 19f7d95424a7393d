"""The rank's commands: start, train; and of the first rank also host, publish, compare, save."""

from collections.abc import Callable, Mapping
from pathlib import Path

from services.learner.guard.wire import encode_comparison
from services.learner.rank.batch_transfer import batches_of
from services.learner.rank.compare_command import Comparing
from services.learner.rank.model import canary_token_ids, score
from services.learner.rank.optimizer import learning_rate
from services.learner.rank.publish import WeightSlots
from services.learner.rank.rank_setup import Models, Setup, load_models
from services.learner.rank.rendezvous import Store, hold
from services.learner.ranks import protocol
from services.learner.types import ModelInfo, Publication

Command = Callable[[protocol.Message], protocol.Message]


class OutOfOrderError(Exception):
    """A step or publication was asked for that is not the next one."""


class Rank:
    """One training rank. Commands come one at a time, and each step exactly once."""

    def __init__(self, setup: Setup, models: Models) -> None:
        self._setup = setup
        self._models = models
        self._batches = batches_of(setup.place, models.replicas)
        self._step = models.step

    @property
    def commands(self) -> Mapping[str, Command]:
        """By name; each takes the message's arguments."""
        return {"train": self.train}

    def info(self) -> ModelInfo:
        """What was loaded."""
        policy, reference = self._models.policy, self._models.reference
        count = sum(parameter.numel() for parameter in policy.named_parameters().values())
        fingerprint = reference.fingerprint() if reference is not None else None
        return ModelInfo(count, policy.head.shape[0], self._step, fingerprint)

    def train(self, message: protocol.Message) -> protocol.Message:
        """Makes the next step with the batch that the message describes.

        Raises OutOfOrderError when its step is not the one after the parameters'.
        """
        batch = self._batches.read(message)
        if batch.step != self._step + 1:
            raise OutOfOrderError(f"step {batch.step} asked for, the next one is {self._step + 1}")
        lr = learning_rate(self._setup.optimizer, batch.step, self._setup.total_steps)
        result = self._models.trainer.train(batch, lr)
        self._step = batch.step
        return protocol.encode_step_result(result)

    def close(self) -> None:
        """Removes what the rank holds in shared memory."""


class FirstRank(Rank):
    """The rank that speaks for all: they hold the same parameters."""

    def __init__(self, setup: Setup, models: Models) -> None:
        super().__init__(setup, models)
        policy = models.policy
        self._slots = WeightSlots(
            policy.named_parameters(), policy.compute_dtype, setup.shm_dir, setup.name
        )
        self._comparing = Comparing(policy, self._slots, setup.policy, setup.rank)

    @property
    def commands(self) -> Mapping[str, Command]:
        """See `Rank.commands`."""
        return {
            **super().commands,
            "publish": self.publish,
            "compare": self.compare,
            "save": self.save,
        }

    def publish(self, message: protocol.Message) -> protocol.Message:
        """Writes the weights and scores the canary.

        Raises OutOfOrderError when the version is not the number of steps behind the weights.
        """
        version, policy = message["version"], self._models.policy
        if version != self._step:
            raise OutOfOrderError(f"version {version} asked for, the weights are {self._step}")
        path, fingerprint, manifest = self._slots.write(version)
        ids = canary_token_ids(policy.head.shape[0])
        logprobs = score(policy, ids, chunk=self._setup.rank.head_chunk)
        published = Publication(
            version, fingerprint, manifest, self._slots.total_bytes, path, ids, logprobs
        )
        return protocol.encode_publication(published)

    def compare(self, message: protocol.Message) -> protocol.Message:
        """Scores a batch again and changes nothing; see `ports.Ranks`."""
        batch = protocol.read_batch(message)
        found = self._comparing.compare(batch, self._step, diagnose=message["diagnose"])
        return encode_comparison(found)

    def save(self, message: protocol.Message) -> protocol.Message:
        """Writes a checkpoint."""
        files = self._models.save(Path(message["directory"]), self._step)
        return protocol.encode_checkpoint(files)

    def close(self) -> None:
        """See `Rank.close`."""
        self._slots.remove()


class Dispatcher:
    """Answers messages; holds the rank from `start` on."""

    def __init__(self) -> None:
        self._rank: Rank | None = None
        self._store: Store | None = None

    def close(self) -> None:
        """Removes what the rank holds in shared memory."""
        if self._rank is not None:
            self._rank.close()

    def answer(self, message: protocol.Message) -> protocol.Message:
        """The result of one command. Raises whatever the command raises."""
        if message["command"] == "host":
            self._store, rendezvous = hold(message["arguments"]["host"])
            return {"rendezvous": rendezvous}
        if message["command"] == "start":
            self._rank = _start(Setup.model_validate(message["arguments"]), self._store)
            return protocol.encode_model_info(self._rank.info())
        if self._rank is None:
            raise OutOfOrderError(f"{message['command']} before start")
        return self._rank.commands[message["command"]](message["arguments"])


def _start(setup: Setup, store: Store | None) -> Rank:
    models = load_models(setup, store)
    return FirstRank(setup, models) if setup.place.index == 0 else Rank(setup, models)
