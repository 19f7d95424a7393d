"""Trajectories whose tokens are the characters of a text."""

from collections.abc import Sequence as Items

import numpy as np

from flotilla_common.domain.attempts import AttemptKey
from flotilla_common.domain.policy import PolicyId
from flotilla_common.domain.token_authors import Author, Span
from flotilla_common.domain.trajectory import Media, Sequence, Trajectory, TurnTiming

_POLICY = PolicyId(1, 0, b"f")
Part = tuple[Author, str]


def prompt(text: str) -> Part:
    return Author.PROMPT, text


def policy(text: str) -> Part:
    return Author.POLICY, text


def environment(text: str) -> Part:
    return Author.ENVIRONMENT, text


def decode(token_ids: Items[int]) -> str:
    return "".join(map(chr, token_ids))


def sequence_of(*parts: Part, media: tuple[Media, ...] = ()) -> Sequence:
    text = "".join(text for _, text in parts)
    spans = tuple(
        Span(author, len(text), _POLICY, 1.0)
        if author is Author.POLICY
        else Span(author, len(text))
        for author, text in parts
    )
    sampled = sum(len(text) for author, text in parts if author is Author.POLICY)
    ids = np.array([ord(char) for char in text], np.int32)
    return Sequence(ids, spans, np.linspace(-1, 0, sampled, dtype=np.float32), media)


def trajectory_of_texts(*sequences: Sequence, turns: tuple[TurnTiming, ...] = ()) -> Trajectory:
    return Trajectory(AttemptKey("g0", 0, 0), "lease", sequences, b"", reward=1.0, turns=turns)
