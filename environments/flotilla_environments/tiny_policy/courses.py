"""Courses of a tiny policy by name, each with its vocabulary and demonstrations.

That of somebody's own tools is made of files: `own_tools.py`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from flotilla_environments.tiny_policy import arithmetic, demonstrations, screens
from flotilla_environments.tiny_policy.train import Example
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.tokenizer_port import Tokenizer


@dataclass(frozen=True)
class Course:
    """One course. `tokenise` turns each of `demonstrations(count, first=, habits=, rng=)` into an
    example. What it `measures` with a tokenizer is told in the manifest."""

    vocabulary_texts: Callable[[], Iterator[str]]
    demonstrations: Callable[..., Iterator[Any]]
    tokenise: Callable[[Any, TemplateDialect, Tokenizer], Example]
    measures: Callable[[Tokenizer], Mapping[str, int]] = lambda tokenizer: {}


COURSES: Mapping[str, Course] = {
    "tools": Course(
        demonstrations.vocabulary_texts,
        demonstrations.make_demonstrations,
        demonstrations.tokenize_episode,
    ),
    "arithmetic": Course(
        arithmetic.vocabulary_texts, arithmetic.make_demonstrations, arithmetic.tokenize_episode
    ),
    "screen": Course(
        screens.vocabulary_texts, screens.make_demonstrations, screens.tokenize_episode
    ),
}
