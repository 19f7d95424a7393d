"""What a tiny policy can be taught: its vocabulary and its demonstrations, by the course's name."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from services.rollout.episodes.prompt import PromptBuilder
from services.rollout.ports import Tokenizer
from tools.tiny_policy import arithmetic, demonstrations
from tools.tiny_policy.train import Example


@dataclass(frozen=True)
class Course:
    """`demonstrations(count, first=, habits=, rng=)` draws what `tokenise` makes examples of."""

    vocabulary_texts: Callable[[], Iterator[str]]
    demonstrations: Callable[..., Iterator[Any]]
    tokenise: Callable[[Any, PromptBuilder, Tokenizer], Example]


COURSES: Mapping[str, Course] = {
    "tools": Course(
        demonstrations.vocabulary_texts, demonstrations.demonstrations, demonstrations.tokenise
    ),
    "arithmetic": Course(
        arithmetic.vocabulary_texts, arithmetic.demonstrations, arithmetic.tokenise
    ),
}
