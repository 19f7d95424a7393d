"""The policy that a run is distilled from, `[learner.teacher]`, and what a run with one cannot ask
for. Pure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field, field_validator

from flotilla_common.spec.config import ConfigModel, given_keys, refuse_problems
from flotilla_common.spec.number_ranges import Seconds
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.endpoints import EndpointUrl, KeyReference

if TYPE_CHECKING:
    from flotilla_learner.config.learner import LearnerConfig

# Keys of `[learner.algorithm]` that only rewards give a meaning.
_OF_REWARDS = ("advantage", "rewards", "turn_coefficient", "critic")


class HintConfig(ConfigModel):
    """A message that the teacher is shown before each attempt, and the policy is not: with it even
    the policy's own base can teach it (self-distillation)."""

    # Where a task's JSON has the text, such as `solution` or `data.solution`.
    key: str = Field(pattern=r"^\w+(\.\w+)*$")
    # The message's content; `{hint}` is that text.
    message: str = "{hint}"
    role: Literal["system", "user"] = "system"

    @field_validator("message")
    @classmethod
    def _message_shows_it(cls, message: str) -> str:
        if "{hint}" not in message:
            raise ValueError("expected {hint} in it, where the task's text is put")
        return message


class TeacherConfig(ConfigModel):
    """A vLLM server that scores the policy's samples. What is made of its logprobs is said by
    `[learner.algorithm.distillation]`."""

    # Where its OpenAI-compatible API begins, such as http://10.0.0.7:8000/v1.
    url: EndpointUrl
    # As the server calls it; absent: the first that it lists.
    model: str = ""
    # `$NAME` of the variable that holds the server's key; absent: it needs none.
    api_key: KeyReference | None = None
    # Folder or hub id with the teacher's tokenizer.json, which must be the policy's, byte by byte;
    # absent: what the server says it serves.
    tokenizer: str | None = Field(default=None, min_length=1)
    # What only the teacher is told; absent: nothing.
    hint: HintConfig | None = None
    # Sequences that it scores at once.
    concurrency: int = Field(default=16, ge=1, le=4096)
    # An answer that takes longer is asked for again.
    timeout_s: Seconds = 300.0
    # The alarm `teacher_down` is raised when no answer came for so long; the run waits on.
    patience_s: Seconds = 120.0


def check_teacher(config: "LearnerConfig", policy: PolicyConfig) -> None:
    """Raise ConfigError with everything that a teacher cannot score, or that would be ignored."""
    if config.teacher is None:
        problems = [
            f"learner.algorithm.distillation.{key}: nobody teaches; add [learner.teacher], or leave"
            " it out"
            for key in given_keys(config.algorithm.distillation)
        ]
    else:
        problems = [*_find_problems(config, policy)]
    refuse_problems("distillation does not work with this spec:", problems)


def _find_problems(config: "LearnerConfig", policy: PolicyConfig) -> Iterator[str]:
    if config.objective != "rl":
        yield 'learner.objective: a teacher scores the policy\'s own samples; set it to "rl"'
    if config.engine != "ranks":
        yield 'learner.engine: only own ranks learn from a teacher yet; set it to "ranks"'
    if config.temperature != 1:
        yield (
            "learner.temperature: vLLM scores prompts at temperature 1, whatever is asked, so the"
            " policy must sample there too; set it to 1"
        )
    if config.top_k is not None:
        yield (
            "learner.top_k: the policy samples from a part of the vocabulary, and the teacher's"
            " logprobs are over all of it; leave it out"
        )
    if config.constant_groups != "mask":
        yield (
            f"learner.constant_groups: {config.constant_groups!r} leaves groups out that the"
            ' teacher teaches something about; set it to "mask"'
        )
    if policy.vision is not None:
        yield "policy.vision: the teacher is shown no pictures; leave it out"
    if not config.algorithm.distillation.alone:
        return
    for key in given_keys(config.algorithm):
        if key in _OF_REWARDS or (key == "kl" and config.algorithm.kl.place == "reward"):
            yield (
                f"learner.algorithm.{key}: with distillation.alone nothing is learned from rewards;"
                " leave it out"
            )
