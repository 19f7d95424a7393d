"""Comparison of a family's renderer with the model's own chat template.

A renderer of another family passes every other test: its prompt is a conversation too, but not the
kind that the model was trained with."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from flotilla_rollout.dialects.rehearsal import (
    CALLS,
    FACTS,
    OFFERED,
    STATED,
    TOOLS,
    answer_calls,
    answer_with_pictures,
    describe_difference,
    with_picture,
)
from flotilla_rollout.dialects.turns import PlayedTurn
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

Conversation = tuple[PromptFacts, Sequence[Tool], Sequence[PlayedTurn]]


class TwoRenderings(Protocol):
    """A dialect that renders conversations by itself, and by the model's own template."""

    def render_turns(
        self, facts: PromptFacts, tools: Sequence[Tool], turns: Sequence[PlayedTurn]
    ) -> list[int]: ...

    def render_by_template(
        self, facts: PromptFacts, tools: Sequence[Tool], turns: Sequence[PlayedTurn]
    ) -> list[int]: ...


def find_other_prompt(
    dialect: TwoRenderings, tokenizer: Tokenizer, *, pictures: bool = False
) -> str:
    """Return the first place where the dialect writes other tokens than the template; empty if
    there is none. With `pictures` some conversations show them.

    Compared is what the policy reads: prompts, and conversations up to its next turn. One that
    either cannot render is left out, except for a prompt."""
    for facts, tools, turns in _conversations(pictures=pictures):
        try:
            wanted = dialect.render_by_template(facts, tools, turns)
            got = dialect.render_turns(facts, tools, turns)
        except TemplateError as error:
            if turns:
                continue
            return str(error)
        if got != wanted:
            return describe_difference(tokenizer, got, wanted)
    return ""


def _conversations(*, pictures: bool) -> Iterator[Conversation]:
    turn = answer_calls([CALLS[1]])
    yield FACTS, TOOLS, ()
    yield STATED, OFFERED, ()
    yield FACTS, TOOLS, [turn]
    yield FACTS, TOOLS, [turn, turn]
    yield FACTS, TOOLS, [answer_calls(CALLS[:3])]
    if pictures:
        seen = with_picture(FACTS)
        yield seen, TOOLS, ()
        yield seen, TOOLS, [answer_with_pictures(1), answer_with_pictures(0, 2)]
