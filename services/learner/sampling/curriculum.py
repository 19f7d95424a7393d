"""Which task comes when: a function of the seed and the sequence number, nothing else.

Environments take turns, so that every step of at least as many groups as there are
environments has all of them. Within an environment each pass over its tasks is a
permutation of its own.
"""

import random
from collections.abc import Sequence
from functools import lru_cache

from services.learner.sampling.tasks import Task


class Curriculum:
    """An endless, seeded order over tasks."""

    def __init__(self, tasks: Sequence[Task], *, seed: int) -> None:
        if not tasks:
            raise ValueError("a curriculum needs at least one task")
        self._seed = seed
        by_env: dict[str, list[Task]] = {}
        for task in tasks:
            by_env.setdefault(task.env_key, []).append(task)
        self._by_env = [by_env[name] for name in sorted(by_env)]
        self._permutation = lru_cache(maxsize=4 * len(self._by_env))(self._shuffle)

    def task(self, sequence_number: int) -> Task:
        """The task of the `sequence_number`-th group of the run, from 0."""
        turn, env = divmod(sequence_number, len(self._by_env))
        tasks = self._by_env[env]
        epoch, position = divmod(turn, len(tasks))
        return tasks[self._permutation(env, epoch)[position]]

    def _shuffle(self, env: int, epoch: int) -> list[int]:
        order = list(range(len(self._by_env[env])))
        random.Random(f"{self._seed}/{env}/{epoch}").shuffle(order)
        return order
