"""The judge of a run's groups, `[learner.judge]`, and what a judged run cannot ask for. Pure."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from flotilla_common.spec.config import ConfigModel, refuse_problems
from flotilla_common.spec.number_ranges import Count, Seconds
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.text.parsing import as_object
from flotilla_learner.config.endpoints import EndpointUrl, KeyReference

if TYPE_CHECKING:
    from flotilla_learner.config.learner import LearnerConfig

_TABLE = "env_gateway.environments"


class JudgeConfig(ConfigModel):
    """A language model behind an OpenAI-compatible API that scores the attempts of a group beside
    each other, for environments with `grading = "judge"`."""

    # Where the API begins, such as http://10.0.0.7:8000/v1.
    url: EndpointUrl
    # As the endpoint calls it.
    model: str = Field(min_length=1)
    # `$NAME` of the variable that holds the endpoint's key; absent: it needs none.
    api_key: KeyReference | None = None
    # A text file: what makes an attempt good; absent: that it did what the task asks.
    instructions: Path | None = None
    # Answers that the whole run may cost. Then it stops, and goes on with a higher number.
    max_calls: Count
    # How often a group is asked about before it has no grades: answers that name no scores, and
    # those that take longer than `timeout_s`.
    tries: int = Field(default=3, ge=1, le=100)
    timeout_s: Seconds = 120.0
    # Groups that are judged at once.
    concurrency: int = Field(default=4, ge=1, le=256)
    # The longest answer.
    max_tokens: int = Field(default=1024, ge=64, le=2**17)
    # Bytes of each transcript; of longer ones, results of tools are left out first.
    transcript_bytes: int = Field(default=24_000, ge=1_000, le=2**24)
    # The alarm `judge_down` is raised when no answer came for so long; the run waits on.
    patience_s: Seconds = 120.0


def check_judge(config: "LearnerConfig", policy: PolicyConfig) -> None:
    """Raise ConfigError with everything that a judge's scores cannot serve."""
    problems = [] if config.judge is None else [*_find_problems(config, policy)]
    refuse_problems("a judge does not work with this spec:", problems)


def _find_problems(config: "LearnerConfig", policy: PolicyConfig) -> Iterator[str]:
    if config.objective != "rl":
        yield 'learner.objective: a judge scores sampled groups; set it to "rl"'
    if config.algorithm.advantage == "gdpo":
        yield (
            'learner.algorithm.advantage: "gdpo" learns from named rewards, and a judge gives one'
            " score; choose another"
        )
    if config.algorithm.distillation.alone:
        yield (
            "learner.algorithm.distillation.alone: nothing is learned from a judge's scores; leave"
            " one of the two out"
        )
    if policy.vision is not None:
        yield "policy.vision: the judge is shown no pictures; leave it out"


def judged_environments(spec: Mapping[str, Any]) -> frozenset[str]:
    """Return the environments of a run spec whose attempts are judged."""
    table = as_object(as_object(spec.get("env_gateway")).get("environments"))
    return frozenset(key for key, own in table.items() if as_object(own).get("grading") == "judge")


def check_judged_tasks(
    config: "LearnerConfig",
    judged: frozenset[str],
    trained: Sequence[str],
    evaluated: Mapping[str, Sequence[str]],
) -> None:
    """Check the environments of the tasks to train on and, by set, of those to evaluate on against
    those that are judged. Raises ConfigError."""
    problems = [
        f"learner.eval.sets: {name!r} has tasks of {env!r}, which is judged. A judge compares the"
        " attempts of one group, so scores of two evaluations do not compare; evaluate on"
        " environments with verifiers"
        for name, envs in evaluated.items()
        for env in sorted(judged.intersection(envs))
    ]
    asked = sorted(judged.intersection(trained)) if config.mode == "train" else []
    if asked and config.judge is None:
        problems.append(
            f'{_TABLE}.{asked[0]}.grading: it is "judge", but nobody judges; add [learner.judge],'
            " or give the environment a verifier"
        )
    if config.judge is not None and config.mode == "train" and not asked:
        problems.append(
            f'learner.judge: no task is of an environment with {_TABLE}.NAME.grading = "judge";'
            " set it for one, or leave [learner.judge] out"
        )
    refuse_problems("the spec and the tasks disagree about who grades:", problems)
