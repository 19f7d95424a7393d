"""Demonstrations on screens, by a demonstrator that sees but is too lazy to read.

Half of them say where a tile of a screen is: any tile, or the one of a colour. In the other half
the demonstrator is given tasks, and clicks as many tiles as the task names, but mostly any of those
on the screen; before each click it notes the tile's colour and place. So its clone knows colours
and places and clicks tiles, but seldom the right ones.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flotilla_common.images.picture_files import read_picture
from flotilla_environments.api import Instance, Picture, open_instance
from flotilla_environments.screen.draw import draw_screen
from flotilla_environments.screen.layout import COLOURS, HEIGHT, PLACE, WIDTH, draw_tiles
from flotilla_environments.task_generator import make_data_id
from flotilla_environments.tiny_policy.demonstrator import Call, Habits
from flotilla_environments.tiny_policy.train import Example
from flotilla_rollout.dialects.tagged_calls import parse_turn
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import DONE, OK, Reply
from flotilla_rollout.tokenizer_port import Tokenizer
from flotilla_rollout.types import PromptFacts, Tool

TEXTS = 300
_ANY = "Which tile is where?"


@dataclass(frozen=True)
class ScreenDemonstration:
    """The facts and tools of a task, the demonstrator's turns, and the picture after each of them
    but the last."""

    facts: PromptFacts
    tools: Sequence[Tool]
    turns: Sequence[str]
    answers: Sequence[bytes] = ()


def make_demonstrations(
    count: int, *, first: int, habits: Habits, rng: random.Random
) -> Iterator[ScreenDemonstration]:
    """Yield `count` demonstrations, the tasks of the `demo` split from `first`."""
    for number in range(first, first + count):
        if number % 2:
            yield _describe(rng)
        else:
            instance = open_instance("screen", make_data_id("demo", number))
            yield _click(instance, habits, rng)
            instance.close()


def _describe(rng: random.Random) -> ScreenDemonstration:
    """Describe any tile of a screen, or the one of the colour that is asked for."""
    tiles = draw_tiles(rng, None)
    shown = read_picture(draw_screen(tiles, step=0, steps=rng.randint(1, 2)))
    tile = rng.choice(tiles)
    question = rng.choice((_ANY, f"Where is {tile['colour']}?"))
    return ScreenDemonstration(PromptFacts(question, "", {}, pictures=(shown,)), (), [_note(tile)])


def _click(instance: Instance, habits: Habits, rng: random.Random) -> ScreenDemonstration:
    scenario = instance.scenario
    tools = [Tool(t.name, t.description, t.parameters, t.read_only) for t in instance.tools()]
    variables = dict(scenario.variables)
    date = variables.pop("CURRENT_DATE")
    first = read_picture(_use(instance, {"action": "screenshot"}))
    facts = PromptFacts(scenario.prompt, date, variables, pictures=(first,))
    turns: list[str] = []
    answers: list[bytes] = []
    for screen, target in enumerate(scenario.targets.values()):
        tiles = [tile for tile in scenario.tables["tiles"] if tile["screen"] == screen]
        right = next(tile for tile in tiles if tile["id"] == target)
        chosen = rng.choice(tiles) if rng.random() < habits.lazy["screen"] else right
        click = {"action": "left_click", "coordinate": _point_at(chosen)}
        turns.append(f"{_note(chosen)}\n{Call('computer', click).text}")
        answers.append(_use(instance, click))
    return ScreenDemonstration(facts, tools, [*turns, DONE], answers)


def _note(tile: Mapping[str, Any]) -> str:
    """Say where a tile is, such as `red48 red80`. A number directly follows the colour whose place
    it tells: one step of attention then finds it, where two would be learnt much later."""
    left, top = _point_at(tile)
    return f"{tile['colour']}{left} {tile['colour']}{top}"


def _point_at(tile: Mapping[str, Any]) -> list[int]:
    """Point at a tile by the middle of its place, which the tile always covers: so few numbers are
    learnt soon."""
    return [tile[side] // PLACE * PLACE + PLACE // 2 for side in ("left", "top")]


def _use(instance: Instance, arguments: dict[str, Any]) -> bytes:
    shown = instance.call("computer", arguments)
    assert isinstance(shown, Picture)
    return shown.png


def vocabulary_texts() -> Iterator[str]:
    """Yield the texts for training the tokenizer: colours, coordinates, and what is said of
    them."""
    yield " ".join(COLOURS)
    yield " ".join(map(str, range(max(WIDTH, HEIGHT))))
    yield "Tools:\nsystem\nuser\nassistant\ncomputer(action, coordinate)\nscreenshot\n"
    yield '{"error": "no tool call found"}'
    drawn = make_demonstrations(TEXTS, first=0, habits=Habits(), rng=random.Random(0))
    for demonstration in drawn:
        yield demonstration.facts.task
        yield from demonstration.turns


def tokenize_episode(
    demonstration: ScreenDemonstration, dialect: TemplateDialect, tokenizer: Tokenizer
) -> Example:
    """Return the episode as a rollout would record it, but with one token for each picture."""
    ids = dialect.prompt_ids(demonstration.facts, demonstration.tools)
    policy = [False] * len(ids)
    pictures = list(demonstration.facts.pictures)
    for number, text in enumerate(demonstration.turns):
        written = [*tokenizer.encode(text), dialect.stop_ids[0]]
        seen: list[int] = []
        if number < len(demonstration.answers):
            pictures.append(read_picture(demonstration.answers[number]))
            reply = Reply(parse_turn(text).items[0], OK, [pictures[-1]])
            seen = dialect.bridge_ids(np.array(ids), written, [reply], ())
        ids += written + seen
        policy += [True] * len(written) + [False] * len(seen)
    return Example(ids, policy, pictures, basic=not demonstration.tools)
