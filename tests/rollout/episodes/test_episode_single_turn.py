"""An episode without tools: one turn, whose text is the final answer."""

import pytest

from flotilla_common.domain.attempts import StopReason
from flotilla_common.domain.token_authors import Author
from flotilla_rollout.types import PromptFacts
from tests.support.rollout import FakeEnvironment, attempt, dialect, runner, tokenizer

TEXT = "7 + 5 = 12\n#### 12"


async def test_the_first_turn_is_the_answer_and_the_end() -> None:
    environment = FakeEnvironment(tools=())
    trajectory = await runner(environment, [TEXT], max_turns=6).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert trajectory.is_graded and trajectory.counts.turns == 1
    [(answer, _)] = environment.episodes[0].grades
    assert answer == TEXT
    assert [span.author for span in trajectory.spans] == [Author.PROMPT, Author.POLICY]


@pytest.mark.parametrize(
    ("written", "answer"),
    [
        ("<think>\n#### 1\n</think>\n\nIt is\n#### 2", "It is\n#### 2"),
        ("<think>\n#### 1", ""),
        ("#### 3 <done>", "#### 3"),
        ("", ""),
    ],
)
async def test_what_is_handed_over_is_the_text_behind_the_thinking(
    written: str, answer: str
) -> None:
    environment = FakeEnvironment(tools=())
    trajectory = await runner(environment, [written]).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert environment.episodes[0].grades[0][0] == answer


async def test_a_turn_that_was_cut_is_distinguished_and_checked_as_far_as_it_went() -> None:
    environment = FakeEnvironment(tools=())
    cut = tokenizer().encode(TEXT)[:-1]
    trajectory = await runner(environment, [TEXT], max_generate_length=len(cut)).run_attempt(
        attempt()
    )
    assert trajectory.stop_reason is StopReason.GENERATION_LENGTH
    assert trajectory.is_graded
    assert environment.episodes[0].grades[0][0] == tokenizer().decode(cut).strip()


async def test_a_call_of_a_tool_that_was_not_offered_is_not_made() -> None:
    environment = FakeEnvironment(tools=())
    call = '<tool_call>{"name": "look", "arguments": {}}</tool_call>#### 4'
    trajectory = await runner(environment, [call]).run_attempt(attempt())
    assert trajectory.stop_reason is StopReason.DONE
    assert not environment.episodes[0].calls and not trajectory.counts.tool_calls


def test_a_prompt_without_tools_speaks_of_none() -> None:
    requests = PromptFacts("Find it.", "", {})
    texts = [
        tokenizer().decode(dialect(name).prompt_ids(requests, [])) for name in ("template", "full")
    ]
    assert texts == ["<|im_start|>user\nFind it.<|im_end|>\n<|im_start|>assistant\n"] * 2


def test_a_prompt_without_tools_still_contains_what_the_environment_knows() -> None:
    requests = PromptFacts("Find it.", "2026-02-14", {"LOGGED_IN_NAME": "Ada"})
    for name in ("template", "full"):
        text = tokenizer().decode(dialect(name).prompt_ids(requests, []))
        assert text.startswith("<|im_start|>user\nToday is 2026-02-14. ")
        assert "\nLogged in as: Ada\n\nFind it.<|im_end|>" in text
