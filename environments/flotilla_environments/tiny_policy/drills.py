"""Drills for tools that are not ours: a user's demonstrations with other values, by a lazy player.

Words and numbers that a demonstration's calls take from its prompt, or from earlier answers, are
replaced in all of them by others, so a policy cannot learn the values by heart: it has to copy
them, also ones that it has never seen. Drills of the last lesson are a lazy player's, who before
each call may claim to be done. So the policy knows the tools, and gives up early: that is left to
the demonstrations and to the verifier."""

import json
import random
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from flotilla_common.episodes.conversations import Conversation, SaidCall, SaidTurn

DONE_WORD = "Done."
_WORD = re.compile(r"[A-Za-z_]+|\d+")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
# Shares of renamed words that are spelled at random, or any word of the user's, and of drills that
# keep the user's values.
_SPELLED, _ANY, _UNCHANGED = 0.05, 0.2, 0.1
# Share of drills that ask for what two demonstrations do.
_JOINED = 0.25
_Change = Callable[[str], str]


def make_drills(
    conversations: Sequence[Conversation], words: Sequence[str], lazy: float, rng: random.Random
) -> Iterator[Conversation]:
    """Yield drills endlessly; their values are of `words`, or spelled at random. The player gives
    up before a call with probability `lazy`. Raises ValueError if no conversation calls a tool."""
    played = [each for each in conversations if any(turn.calls for turn in each.turns)]
    if not played:
        raise ValueError("no demonstration calls a tool: there is nothing to drill")
    most, stock = max(map(_count_calls, played)), WordStock(played, words)
    while True:
        drill = _vary(rng.choice(played), stock, rng)
        if rng.random() < _JOINED:
            other = _vary(rng.choice(played), stock, rng)
            if _count_calls(drill) + _count_calls(other) <= most and drill.tools == other.tools:
                drill = _join(drill, other)
        yield _give_up(drill, lazy, rng)


class WordStock:
    """Words that may take the place of others: mostly such as stand in the same place of the same
    argument of some demonstration: a name is replaced by a name sooner than by a verb."""

    def __init__(self, conversations: Sequence[Conversation], words: Sequence[str]) -> None:
        self._words = words
        self._places: defaultdict[str, set[tuple[str, str, int]]] = defaultdict(set)
        self._standing: defaultdict[tuple[str, str, int], dict[str, None]] = defaultdict(dict)
        for call in (call for each in conversations for turn in each.turns for call in turn.calls):
            for name, value in json.loads(call.arguments).items():
                for leaf in leaves_of(value):
                    for number, word in enumerate(_WORD.findall(leaf)):
                        self._places[word].add((call.name, name, number))
                        self._standing[call.name, name, number][word] = None

    def draw(self, word: str, rng: random.Random) -> str:
        """Return a word for another one, or a number for a number."""
        if word.isdigit():
            # Without a leading zero: JSON has no such numbers.
            low = 10 ** (len(word) - 1) if len(word) > 1 else 0
            return str(rng.randint(low, 10 ** len(word) - 1))
        drawn = rng.random()
        if drawn < _SPELLED or not self._words:
            return "".join(rng.choices(_LETTERS, k=rng.randint(2, 7)))
        if drawn < _SPELLED + _ANY or word not in self._places:
            return rng.choice(self._words)
        return rng.choice([*self._standing[rng.choice(sorted(self._places[word]))]])


def words_of(texts: Sequence[str]) -> list[str]:
    """Return the words of texts, without numbers, each once, in their order."""
    found = (word for text in texts for word in _WORD.findall(text) if not word.isdigit())
    return list(dict.fromkeys(found))


def leaves_of(value: Any) -> list[str]:
    """Return the texts and numbers of a JSON value, in their order."""
    found: list[str] = []

    def keep(text: str) -> str:
        found.append(text)
        return text

    _map_leaves(value, keep)
    return found


def _map_leaves(value: Any, change: _Change) -> Any:
    """Return a JSON value with its texts and natural numbers changed, but not names of fields."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {name: _map_leaves(each, change) for name, each in value.items()}
    if isinstance(value, list):
        return [_map_leaves(each, change) for each in value]
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return int(change(str(value)))
    return value


def _vary(conversation: Conversation, stock: WordStock, rng: random.Random) -> Conversation:
    """Return the conversation with other values."""
    if rng.random() < _UNCHANGED:
        return conversation
    change = _make_renaming(find_values(conversation), stock, rng)
    return msgspec.structs.replace(
        conversation,
        prompt=change(conversation.prompt),
        turns=tuple(_change_turn(turn, change) for turn in conversation.turns),
    )


def find_values(conversation: Conversation) -> list[str]:
    """Return the texts that calls and the final answer take from what stands before them: whole
    values, and of values that stand nowhere as they are, such as queries, words of the prompt."""
    found: dict[str, None] = {}
    before = conversation.prompt
    prompt_words = set(_WORD.findall(conversation.prompt))
    for turn in conversation.turns:
        said = [turn.content] if turn.content != DONE_WORD else []
        for leaf in [*leaves_of([json.loads(call.arguments) for call in turn.calls]), *said]:
            if leaf and re.search(_bounded(leaf), before):
                found[leaf] = None
            else:
                parts = (word for word in _WORD.findall(leaf) if word in prompt_words)
                found |= dict.fromkeys(parts)
        before += "".join(f"\n{reply.text}" for reply in turn.replies)
    return list(found)


def _bounded(text: str) -> str:
    return rf"(?<!\w){re.escape(text)}(?!\w)"


def _make_renaming(values: Sequence[str], stock: WordStock, rng: random.Random) -> _Change:
    """Return what replaces each word of these values in a text, always by the same other one."""
    if not values:
        return lambda text: text
    renamed: dict[str, str] = {}

    def rename_word(found: re.Match[str]) -> str:
        word = found[0]
        if word not in renamed:
            renamed[word] = stock.draw(word, rng)
        return renamed[word]

    pattern = re.compile("|".join(map(_bounded, sorted(values, key=len, reverse=True))))
    return lambda text: pattern.sub(lambda found: _WORD.sub(rename_word, found[0]), text)


def _change_turn(turn: SaidTurn, change: _Change) -> SaidTurn:
    calls = (
        SaidCall(call.name, json.dumps(_map_leaves(json.loads(call.arguments), change)))
        for call in turn.calls
    )
    replies = (msgspec.structs.replace(each, text=change(each.text)) for each in turn.replies)
    return msgspec.structs.replace(
        turn, content=change(turn.content), calls=tuple(calls), replies=tuple(replies)
    )


def _join(first: Conversation, second: Conversation) -> Conversation:
    """Return a conversation that asks for both, and does both."""
    return msgspec.structs.replace(
        first,
        prompt=f"{first.prompt} Then {second.prompt[:1].lower()}{second.prompt[1:]}",
        turns=(*(turn for turn in first.turns if turn.calls), *second.turns),
    )


def _give_up(conversation: Conversation, lazy: float, rng: random.Random) -> Conversation:
    """Return the conversation up to a call before which the player claims to be done."""
    for number, turn in enumerate(conversation.turns):
        if turn.calls and rng.random() < lazy:
            turns = (*conversation.turns[:number], SaidTurn(DONE_WORD))
            return msgspec.structs.replace(conversation, turns=turns)
    return conversation


def _count_calls(conversation: Conversation) -> int:
    return sum(len(turn.calls) for turn in conversation.turns)
