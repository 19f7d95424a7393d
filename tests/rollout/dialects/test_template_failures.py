"""Templates that cannot show the policy what its tools answer: named at the start, or the group
is given up whole."""

import re
from typing import Literal

import psutil
import pytest

from flotilla_common.domain.attempts import FailureKind, StopReason
from flotilla_common.domain.trajectory import Trajectory
from flotilla_rollout.adapters.chat_template_process import TEMPLATES
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.fake import FakeEngine
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.episodes.episode import AttemptRunner
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import Tool
from tests.rollout.dialects.templates import AT_MOST_THREE, GEMMA, MISTRAL, chatml, tokenizer_with
from tests.support.process_commands import command_of
from tests.support.rollout import POLICY, TOOL, FakeEnvironment, attempt, limits, turns

CALL = '<tool_call>{"name": "look", "arguments": {"at": "it"}}</tool_call>'


async def play(
    template: str, *texts: str, name: Literal["template", "full"] = "template", tool: Tool = TOOL
) -> tuple[Trajectory, FakeEnvironment]:
    tokenizer = tokenizer_with(template)
    dialect = choose_dialect("", tokenizer, DialectConfig(name=name))
    write = (
        turns(*texts) if "im_start" in template else lambda shown: texts[shown.count("model") - 1]
    )
    engine = FakeEngine(tokenizer, dialect.stop_ids[0], write, policy=POLICY)
    environment = FakeEnvironment(tools=(tool,))
    runner = AttemptRunner(engine, environment, tokenizer, dialect, limits())
    return await runner.run_attempt(attempt()), environment


def test_a_template_that_refuses_tool_results_is_refused_before_anything_is_played() -> None:
    with pytest.raises(TemplateError) as refused:
        TemplateDialect(tokenizer_with(GEMMA))
    message = str(refused.value)
    assert "Conversation roles must alternate" in message
    assert "user, assistant, tool" in message, "it names what could not be rendered"
    assert 'rollout.dialect.name = "full"' in message, "and what to do"


def test_a_template_that_wants_ids_of_calls_gets_them() -> None:
    assert TemplateDialect(tokenizer_with(MISTRAL)).stop_ids


@pytest.mark.parametrize("count", [1, 2, 3])
def test_results_of_up_to_three_calls_are_rendered_at_the_start(count: int) -> None:
    check = (
        "{%- if messages | selectattr('role', 'equalto', 'tool') | list | length == "
        f"{count}" + " %}{{- raise_exception('not ' ~ messages[-1].role) }}{%- endif %}"
    )
    with pytest.raises(TemplateError, match=", ".join(["tool"] * count) + ".*not tool"):
        TemplateDialect(tokenizer_with(chatml(check)))


def test_no_other_dialect_is_recommended_where_none_works() -> None:
    check = "{%- if messages | length > 2 %}{{- raise_exception('one turn') }}{%- endif %}"
    with pytest.raises(TemplateError) as refused:
        TemplateDialect(tokenizer_with(chatml(check)))
    assert "rollout.dialect" not in str(refused.value)
    with pytest.raises(TemplateError, match=r"user, assistant, user.*one turn"):
        FullDialect(tokenizer_with(chatml(check)))


@pytest.mark.parametrize(
    "fault",
    ["{{- message.content.nothing.at_all }}", "{{- 1 // 0 }}", "{%- for x in 3 %}{%- endfor %}"],
)
def test_whatever_a_template_raises_is_the_templates_fault(fault: str) -> None:
    check = "{%- if message.role == 'tool' %}" + fault + "{%- endif %}"
    with pytest.raises(TemplateError, match="user, assistant, tool"):
        TemplateDialect(tokenizer_with(chatml(check)))


async def test_the_dialect_that_is_recommended_plays_to_the_end() -> None:
    trajectory, environment = await play(GEMMA, CALL + CALL, "<done>", name="full")
    assert trajectory.stop_reason is StopReason.DONE
    assert len(environment.episodes[0].calls) == 2


async def test_a_result_that_cannot_be_rendered_later_is_no_failure_like_others() -> None:
    good, _ = await play(AT_MOST_THREE, CALL * 3, "<done>")
    assert good.is_graded
    bad, environment = await play(AT_MOST_THREE, CALL * 4, "<done>")
    assert bad.failure is FailureKind.TEMPLATE_ERROR
    assert "at most three tool results in a row" in bad.detail
    assert bad.sequences == ()
    assert environment.episodes[0].closed
    assert not environment.episodes[0].grades


async def test_a_tool_that_the_template_cannot_render_is_a_template_error_too() -> None:
    check = (
        "{%- for tool in tools or [] %}{{- tool.function.parameters.title.upper() }}{%- endfor %}"
    )
    bad, _ = await play(chatml(check), "<done>")
    assert bad.failure is FailureKind.TEMPLATE_ERROR
    assert re.search("cannot render user: .*title", bad.detail)


async def test_text_that_the_tokenizer_refuses_is_a_template_error_too() -> None:
    """JSON allows half a character in a tool, which is no text."""
    hostile = Tool("look", "half of \ud83d", {"type": "object", "properties": {}})
    shows = chatml("{%- for tool in tools or [] %}{{- tool.function.description }}{%- endfor %}")
    bad, _ = await play(shows, "<done>", tool=hostile)
    assert bad.failure is FailureKind.TEMPLATE_ERROR
    assert "cannot be tokenised" in bad.detail


_ENDLESS = "{%- for a in range(99999) %}{%- for b in range(99999) %}{%- endfor %}{%- endfor %}"


def test_a_rendering_without_an_end_is_ended_and_the_next_one_is_made() -> None:
    with pytest.raises(TemplateError, match="it takes more than 2 s"):
        TEMPLATES.render_template(conversations=[[]], chat_template=_ENDLESS)
    assert TEMPLATES.render_template(conversations=[[]], chat_template="text") == "text"


@pytest.mark.parametrize(
    "bomb",
    [
        # These compute for as long as allowed, once for each dialect that may be recommended.
        pytest.param(_ENDLESS, marks=pytest.mark.slow),
        pytest.param("{{- 10 ** (10 ** 10) }}", marks=pytest.mark.slow),
        "{{- ('a' * (10 ** 12)) | length }}",
        # It writes two gibibytes before it runs out of memory.
        pytest.param(
            "{%- set text = namespace(of='aaaa') %}{%- for a in range(60) %}"
            "{%- set text.of = text.of ~ text.of %}{%- endfor %}",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_template_without_an_end_is_refused_and_the_next_one_is_rendered(
    bomb: str,
) -> None:
    with pytest.raises(TemplateError, match=r"cannot render user: (it takes|MemoryError)"):
        TemplateDialect(tokenizer_with(chatml(bomb)))
    assert TemplateDialect(tokenizer_with(chatml(""))).stop_ids[0] > 0


def test_a_template_that_makes_a_flood_of_text_is_refused() -> None:
    flood = "{%- for a in range(20000) %}{{- 'a' * 1000 }}{%- endfor %}"
    with pytest.raises(TemplateError, match=r"it makes 20000\d+ characters, more than"):
        TemplateDialect(tokenizer_with(chatml(flood)))


def test_a_template_that_raises_a_flood_of_text_is_reported_in_few_words() -> None:
    flood = "{{- raise_exception('x' * 5000000) }}"
    with pytest.raises(TemplateError, match="xxx") as refused:
        TEMPLATES.render_template(conversations=[[]], chat_template=flood)
    assert len(str(refused.value)) == 2000


def test_half_a_character_reaches_the_template_and_comes_back() -> None:
    tokenizer = tokenizer_with(chatml(""))
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "a\ud83dz\u2028"}], None, True
    )
    assert "a\ud83dz\u2028" in text


def test_a_child_that_was_killed_from_outside_is_no_fault_of_the_template() -> None:
    tokenizer = tokenizer_with(chatml(""))
    user = [{"role": "user", "content": "Find it"}]
    before = tokenizer.apply_chat_template(user, None, True)
    children = [
        child
        for child in psutil.Process().children()
        if "flotilla_rollout.adapters.chat_template_child" in command_of(child)
    ]
    assert children
    for child in children:
        child.kill()
        psutil.wait_procs([child], timeout=0.2)
    assert tokenizer.apply_chat_template(user, None, True) == before
