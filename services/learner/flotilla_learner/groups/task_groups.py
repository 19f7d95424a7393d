"""Groups for the tasks that the curriculum draws."""

from collections.abc import Iterable

from flotilla_common.domain.attempts import Purpose
from flotilla_learner.group_types import GroupSpec
from flotilla_learner.sampling.curriculum import Curriculum


class FreshGroups:
    """Maker of TRAIN groups; it knows which of them may not be journaled yet.

    A restart continues after the last number in the journal. So that none is left out, every
    lease and every curriculum change is journaled with the groups drawn before it."""

    def __init__(
        self,
        curriculum: Curriculum,
        *,
        size: int,
        temperature: float,
        top_k: int = 0,
        top_p: float = 1.0,
    ) -> None:
        self.curriculum = curriculum
        self._size = size
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._unjournaled: dict[str, GroupSpec] = {}

    def __call__(self) -> GroupSpec:
        """Make the next group of the run."""
        number = self.curriculum.number
        spec = GroupSpec(
            group_id=f"g{number:06d}r0",
            sequence_number=number,
            task=self.curriculum.draw_task(),
            purpose=Purpose.TRAIN,
            size=self._size,
            temperature=self._temperature,
            top_k=self._top_k,
            top_p=self._top_p,
        )
        self._unjournaled[spec.group_id] = spec
        return spec

    @property
    def unjournaled(self) -> tuple[GroupSpec, ...]:
        return tuple(self._unjournaled.values())

    def mark_journaled(self, specs: Iterable[GroupSpec]) -> None:
        """Record that these are on disk."""
        for spec in specs:
            self._unjournaled.pop(spec.group_id, None)
