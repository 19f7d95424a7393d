"""Selection of tasks, `[learner.select]`, and their order, `[learner.sampling]`."""

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from flotilla_common.spec.config import ConfigModel
from flotilla_common.spec.number_ranges import Count, Share, Steps
from flotilla_common.spec.text_lists import TextList, split_list

Weight = Annotated[float, Field(ge=0, le=1e6)]
Level = Annotated[int, Field(ge=0, le=1_000_000)]
Tasks = Annotated[int, Field(ge=1, le=1_000_000_000)]


def _parse_levels(value: Any) -> Any:
    value = (value,) if isinstance(value, int) else split_list(value)
    if not isinstance(value, tuple):
        return value
    return tuple(int(part) if str(part).isdecimal() else part for part in value)


Names = Annotated[TextList, Field(min_length=1)]


class SelectConfig(ConfigModel):
    """Filters on the tasks of a task file; a key that is not set filters nothing."""

    modality: Literal["tool_use", "computer_use", "browser_use", "joint", "single_turn"] | None = (
        None
    )
    env_keys: TextList = ()
    # If set, tasks without a difficulty are left out.
    difficulty: Annotated[tuple[Level, ...], BeforeValidator(_parse_levels)] = ()
    data_version: str | None = Field(default=None, min_length=1)
    # Tools on offer, by environment or by task, the latter first; others are neither shown nor
    # callable. Where none are named, all are offered.
    tools: dict[str, Names] = Field(default_factory=dict[str, Names])
    # Only tasks that `checks`, a file of `flotilla data check`, calls valid as they are.
    checked: bool = False
    checks: str | None = Field(default=None, min_length=1)
    # Most training tasks, after the other filters; evaluation sets have their own `count`.
    max_tasks: Tasks | None = None

    @model_validator(mode="after")
    def _checked_names_the_results(self) -> Self:
        if self.checked and self.checks is None:
            raise ValueError(
                'checked: it needs checks, the results of `flotilla data check`: checks = "FILE"'
            )
        if self.checks is not None and not self.checked:
            raise ValueError("checks: it has no effect without checked = true")
        return self


class DifficultyConfig(ConfigModel):
    """Temporary exclusion of tasks that every attempt solves, or none does."""

    enabled: bool = False
    # Groups of a task before it may be parked.
    min_groups: Count = 2
    # A task is parked at a running pass rate of at least `solved`, or of at most `impossible`.
    solved: float = Field(default=0.95, gt=0, le=1)
    impossible: Share = 0.02
    # Weight of a task's earlier groups against its newest; 1 forgets nothing.
    decay: float = Field(default=0.5, gt=0, le=1)
    # Share of an environment's draws that retries a parked task; 0: none.
    probe_share: float = Field(default=0.1, ge=0, le=0.5)

    @model_validator(mode="after")
    def _there_is_something_between(self) -> Self:
        if self.impossible >= self.solved:
            raise ValueError(
                f"impossible: {self.impossible}, which must be below solved, {self.solved}"
            )
        return self


class SamplingConfig(ConfigModel):
    """The order of tasks."""

    # How many groups each environment gets: the same number, a number proportional to its tasks, or
    # according to `weights`.
    mixing: Literal["uniform", "proportional", "weights"] = "uniform"
    # By environment, for `mixing = "weights"`; 0 leaves an environment out.
    weights: dict[str, Weight] = Field(default_factory=dict[str, Weight])
    # Every environment has this many of each `groups_per_step` groups, whatever its weight.
    min_per_env: int = Field(default=0, ge=0, le=1_000_000)
    # Steps of an epoch, for the metric; absent means as many groups as there are tasks.
    epoch_steps: Steps | None = None
    # Largest share of an environment's tasks that may be quarantined.
    quarantine_share: Share = 0.1
    difficulty: DifficultyConfig = DifficultyConfig()

    @model_validator(mode="after")
    def _weights_belong_to_their_mixing(self) -> Self:
        if self.mixing == "weights" and not any(self.weights.values()):
            raise ValueError(
                'weights: mixing is "weights", but no environment has a weight above 0'
            )
        if self.mixing != "weights" and self.weights:
            raise ValueError(f'weights: they need mixing = "weights", not "{self.mixing}"')
        return self
