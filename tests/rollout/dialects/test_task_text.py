"""The environment's date and variables stand in the prompt of every dialect, in the same words."""

from typing import Literal

import pytest

from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.types import PromptFacts
from tests.rollout.dialects.families import FAMILIES, Family
from tests.rollout.dialects.native_calls import TOOLS
from tests.rollout.dialects.stages import make_tokenizer
from tests.support.rollout import dialect, tokenizer

VARIABLES = {"REGION": "north", "LOGGED_IN_USER": "u-17", "LOGGED_IN_NAME": "Ann"}
FACTS = PromptFacts("Where is the order?", "2026-01-31", VARIABLES)
TEXT = """\
Today is 2026-01-31. When a date has no year, assume the current or a future year.
Logged in user ID: u-17
Logged in as: Ann
REGION: north

Where is the order?"""


@pytest.mark.parametrize("name", ["template", "full"])
def test_a_prompt_states_day_and_user(name: Literal["template", "full"]) -> None:
    for tools in ([], TOOLS):
        prompt = tokenizer().decode(dialect(name).prompt_ids(FACTS, tools))
        assert prompt.count(TEXT) == 1


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.name)
def test_a_prompt_of_every_family_states_day_and_user(family: Family) -> None:
    made = make_tokenizer(family)
    options = {} if family.dialect == "template" else dict(family.options)
    # A parser reads turns and does not change prompts.
    config = DialectConfig(name=family.dialect, options=options, own_prompt=family.own_prompt)
    chosen = choose_dialect(family.models[0], made, config)
    assert made.decode(chosen.prompt_ids(FACTS, TOOLS)).count(TEXT) == 1


def test_a_task_without_variables_is_its_prompt_alone() -> None:
    assert PromptFacts("Where?", "", {}, ("A map.",)).task == "Where?\n\nA map."
