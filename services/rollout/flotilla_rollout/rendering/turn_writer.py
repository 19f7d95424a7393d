"""One turn of a conversation as the policy would have sampled it: thinking, text, calls and the
token that ends it, also where the chat template writes that token into the next message, as GLM's
does."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from flotilla_common.domain.messages import TokenText
from flotilla_rollout.dialects.rehearsal import cut_at_stop
from flotilla_rollout.dialects.thinking import THOUGHT
from flotilla_rollout.dialects.turns import DONE, OK, ParseError, PlayedTurn, Reply, Turn
from flotilla_rollout.episodes.conversation import MessageReader
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

_QUESTION = PromptFacts("QUESTION", "", {})


@dataclass(frozen=True, slots=True)
class WrittenTurn:
    """The tokens of a turn, as the dialect reads them; `fault` is the reason why they are not what
    was said, "" if they are."""

    token_ids: list[int]
    read: Turn
    fault: str


class TurnWriter:
    """Finds the tokens of turns in one dialect.

    A turn is rendered after a short prompt, as the last one: so it does not depend on its place in
    a conversation, and its thinking is there."""

    def __init__(self, tokenizer: Tokenizer, dialect: Dialect) -> None:
        self._tokenizer = tokenizer
        self._dialect = dialect
        self._reader = MessageReader(tokenizer, dialect)
        # The newest toolbox and its prompt: the turns of a conversation have one.
        self._known: tuple[Sequence[Tool], list[int]] | None = None

    def write(
        self, before: NDArray[np.int32], turn: PlayedTurn, tools: Sequence[Tool], *, ends: bool
    ) -> WrittenTurn:
        """Return the tokens of a turn after those `before` it. If it `ends` the conversation
        without a call, it declares so where the dialect wants that. Raises TemplateError."""
        said, thought = turn.said.replace(DONE, "").strip(), turn.thought.strip()
        turn = replace(turn, said=said, thought=thought, replies=(), user="")
        written = self._write(before, turn, tools)
        if turn.calls or not ends or written.fault or written.read.done:
            return written
        declared = self._write(before, replace(turn, said=f"{said}\n{DONE}".strip()), tools)
        if declared.fault or declared.read.done:
            return declared
        return replace(declared, fault="it is not read as the end of the conversation")

    def _write(
        self, before: NDArray[np.int32], turn: PlayedTurn, tools: Sequence[Tool]
    ) -> WrittenTurn:
        ids = self._write_tokens(turn, tools)
        read = self._dialect.parse_turn(before, ids, tools)
        return WrittenTurn(ids, read, self._find_fault(ids, turn, read))

    def _prompt_of(self, tools: Sequence[Tool]) -> list[int]:
        if self._known is None or self._known[0] is not tools:
            self._known = tools, self._dialect.prompt_ids(_QUESTION, tools)
        return self._known[1]

    def _write_tokens(self, turn: PlayedTurn, tools: Sequence[Tool]) -> list[int]:
        """Return a turn's tokens, with the one that ends it if there is one."""
        prompt = self._prompt_of(tools)
        whole = self._dialect.render_turns(_QUESTION, tools, [turn])
        ids = self._after(prompt, whole)
        if ids is None:
            ids = self._tokenizer.encode(self._complete(prompt, turn, whole, tools))
        stops = self._dialect.stop_ids
        follows = [] if any(token in stops for token in ids) else self._follow(turn, tools)
        return cut_at_stop(ids, follows, stops)

    def _after(self, prompt: Sequence[int], whole: Sequence[int]) -> list[int] | None:
        """Return what follows a prompt in a longer text; None if it begins otherwise."""
        if list(whole[: len(prompt)]) == list(prompt):
            return list(whole[len(prompt) :])
        # Tokens may span the end of the prompt: a policy continues it as it is.
        start, text = self._tokenizer.decode(prompt), self._tokenizer.decode(whole)
        return self._tokenizer.encode(text[len(start) :]) if text.startswith(start) else None

    def _complete(
        self, prompt: Sequence[int], turn: PlayedTurn, whole: Sequence[int], tools: Sequence[Tool]
    ) -> str:
        """Return a turn after a prompt that begins a thinking, which the template leaves out of
        this turn. Raises TemplateError."""
        decode = self._tokenizer.decode
        if not turn.thought:
            thinking = replace(turn, thought=THOUGHT)
            shown = self._after(prompt, self._dialect.render_turns(_QUESTION, tools, [thinking]))
            if shown is not None and THOUGHT in (text := decode(shown)):
                return text.replace(THOUGHT, "", 1)
        marks = self._dialect.thinking
        found = marks.follow_prompt(decode(prompt), turn.thought, decode(whole))
        if found is None:
            raise TemplateError("the chat template shows a turn after another start than it opens")
        return found

    def _follow(self, turn: PlayedTurn, tools: Sequence[Tool]) -> list[int]:
        """Return the token after a turn where its answers, or a user, come next: some families end
        turns by it. Empty if the turn is then shown otherwise."""
        plain = replace(turn, thought="")
        replies = [Reply(call, OK, ["ok"]) for call in turn.calls]
        answered = replace(plain, replies=replies, user="" if replies else "ok")
        alone, whole = (
            self._dialect.render_turns(_QUESTION, tools, [each]) for each in (plain, answered)
        )
        return whole[len(alone) :][:1] if whole[: len(alone)] == alone else []

    def _find_fault(self, ids: Sequence[int], turn: PlayedTurn, read: Turn) -> str:
        """Return how the policy's turn would be read otherwise than it was said; "" if it is not.
        Space around texts counts as the template's."""
        stops = self._dialect.stop_ids
        if not ids or ids[-1] not in stops:
            return "no token ends it"
        if any(token in stops for token in ids[:-1]):
            return "it has a token within it that ends a turn"
        if errors := [item for item in read.items if isinstance(item, ParseError)]:
            return f"its calls are read as an error: {errors[0].message}"
        calls = [(each.name, json.loads(each.arguments_json)) for each in turn.calls]
        found = [
            (each.name, json.loads(each.arguments_json))
            for each in read.items
            if not isinstance(each, ParseError)
        ]
        if _spell(found) != _spell(calls):
            return f"{len(calls)} calls are read as {len(found)}, or as other ones"
        if read.answer.strip() != turn.said.replace(DONE, "").strip():
            return "its text is read as another one"
        if self._read_thought(ids, read) != turn.thought:
            return "its thinking is left out, or read as another one"
        return ""

    def _read_thought(self, ids: Sequence[int], read: Turn) -> str:
        told = self._reader.read_turn(ids, read, 0, lambda text, token: "").thinking
        if isinstance(told, TokenText):
            told = told.read(ids, self._tokenizer.decode)
        return told.strip()


def _spell(calls: Sequence[tuple[str, object]]) -> str:
    """Spell calls so that 1, 1.0 and true differ."""
    return json.dumps(calls, sort_keys=True)
