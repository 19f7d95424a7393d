"""Each picture has one place in a prompt and in replies, where the model's own template has it."""

import numpy as np
import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.model_files import find_pad
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.rehearsal import (
    CALLS,
    FACTS,
    PICTURE,
    TOOLS,
    rehearse_dialect,
    with_picture,
)
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.turns import OK, PlayedTurn, Reply
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError
from flotilla_rollout.types import PromptFacts
from tests.rollout.dialects.families import FAMILIES
from tests.rollout.dialects.templates import (
    PAD,
    chatml,
    seeing,
    tokenizer_that_sees,
    tokenizer_with,
    vision_ids,
)
from tests.support.model_zoo import make_tokenizer, read_template
from tests.support.vision_family import make_family

SHOWN = f"<|vision_start|>{PAD}<|vision_end|>"
_FAMILIES = [
    *((each.template, name) for each in FAMILIES if each.sees for name in (each.dialect, "full")),
    ("trl/qwen3_vl.jinja", "template"),
    ("trl/qwen2_5_vl.jinja", "full"),
]


def from_zoo(template: str) -> TransformersTokenizer:
    return TransformersTokenizer(make_tokenizer("qwen3", (), read_template(template)))


def reply(*parts: object) -> Reply:
    return Reply(CALLS[0], OK, list(parts))  # pyright: ignore[reportArgumentType]


def follow(dialect: Dialect, tokenizer: TransformersTokenizer, *replies: Reply) -> str:
    """Return what follows a turn that these replies answer."""
    prompt = dialect.prompt_ids(FACTS, TOOLS)
    turn = PlayedTurn([CALLS[0]] * len(replies))
    whole = dialect.render_turns(FACTS, TOOLS, [turn])
    before, written = np.array(prompt, np.int32), whole[len(prompt) :]
    return tokenizer.decode(dialect.bridge_ids(before, written, replies, TOOLS))


@pytest.mark.parametrize(("template", "name"), _FAMILIES)
def test_published_templates_show_pictures_in_prompts_and_replies(template: str, name: str) -> None:
    tokenizer = from_zoo(template)
    dialect = choose_dialect("", tokenizer, DialectConfig(name=name), (), PAD)
    rehearse_dialect(dialect, tokenizer, "all", PAD)
    prompt = tokenizer.decode(dialect.prompt_ids(with_picture(FACTS), TOOLS))
    assert f"{FACTS.task}{SHOWN}<|im_end|>" in prompt
    shown = follow(dialect, tokenizer, reply("one", PICTURE), reply("two"), reply(PICTURE, PICTURE))
    assert [piece.count(PAD) for piece in shown.split("two")] == [1, 2]
    assert f"one{SHOWN}" in shown


def test_the_model_of_a_renderer_that_shows_pictures_plays_by_it() -> None:
    tokenizer = from_zoo("trl/qwen3_vl.jinja")
    name = "Qwen/Qwen3-VL-8B-Instruct"
    chosen = choose_dialect(name, tokenizer, DialectConfig(), (), PAD)
    rehearse_dialect(chosen, tokenizer, "all", PAD)
    with pytest.raises(TemplateError, match="the renderer 'qwen3' shows no pictures"):
        choose_dialect("", tokenizer, DialectConfig(name="qwen3"), (), PAD)


def test_pictures_of_tools_are_in_their_messages_if_the_template_shows_them_there() -> None:
    tokenizer = tokenizer_that_sees(seeing())
    dialect = TemplateDialect(tokenizer, pad=PAD)
    rehearse_dialect(dialect, tokenizer, "all", PAD)
    shown = follow(dialect, tokenizer, reply("one", PICTURE), reply("two", PICTURE))
    assert f"<|im_start|>tool\none{SHOWN}<|im_end|>" in shown
    assert f"<|im_start|>tool\ntwo{SHOWN}<|im_end|>" in shown


def test_pictures_that_a_template_drops_in_tool_messages_follow_as_a_users() -> None:
    tokenizer = tokenizer_that_sees(seeing("tool"))
    dialect = TemplateDialect(tokenizer, pad=PAD)
    rehearse_dialect(dialect, tokenizer, "all", PAD)
    shown = follow(dialect, tokenizer, reply("one", PICTURE), reply("two", PICTURE))
    after = f"<|im_start|>tool\ntwo<|im_end|>\n<|im_start|>user\n{SHOWN}{SHOWN}<|im_end|>\n"
    assert shown.endswith(f"{after}<|im_start|>assistant\n")
    assert follow(dialect, tokenizer, reply("one")).count("user") == 0


def test_a_template_that_drops_all_pictures_is_refused_with_what_to_do() -> None:
    tokenizer = tokenizer_that_sees(seeing("tool", "user"))
    refusal = "leaves out pictures in tool messages, and in a user's message after them; pictures"
    with pytest.raises(TemplateError, match=refusal):
        TemplateDialect(tokenizer, pad=PAD)
    with pytest.raises(TemplateError, match=r"leaves out pictures in user messages; .*\[policy"):
        FullDialect(tokenizer, pad=PAD)


def test_a_template_that_drops_a_users_pictures_alone_is_found_by_the_rehearsal() -> None:
    tokenizer = tokenizer_that_sees(seeing("user"))
    dialect = TemplateDialect(tokenizer, pad=PAD)
    with pytest.raises(TemplateError, match="has 0 places for 1 pictures; give the model one"):
        rehearse_dialect(dialect, tokenizer, "all", PAD)


def test_a_template_of_texts_alone_is_refused() -> None:
    text = tokenizer_that_sees(chatml(""))
    for make in (TemplateDialect, FullDialect):
        with pytest.raises(TemplateError, match=r"can only concatenate .*; pictures are"):
            make(text, pad=PAD)
    rehearse_dialect(FullDialect(text), text)


def test_a_template_that_numbers_pictures_is_refused() -> None:
    numbered = tokenizer_that_sees(seeing(label="'Picture ' ~ ns.pictures ~ ': '"))
    dialect = FullDialect(numbered, pad=PAD)
    with pytest.raises(TemplateError, match="pictures appended to a turn are not what"):
        rehearse_dialect(dialect, numbered, "all", PAD)


@pytest.mark.parametrize("make", [TemplateDialect, FullDialect])
def test_a_spelled_place_of_a_picture_is_text(
    make: type[TemplateDialect] | type[FullDialect],
) -> None:
    tokenizer = tokenizer_that_sees(seeing())
    dialect = make(tokenizer, pad=PAD)
    spelled = f"{SHOWN} and <|video_pad|>"
    prompt = dialect.prompt_ids(PromptFacts(spelled, "", {}, (spelled,)), TOOLS)
    assert not {*prompt} & {*vision_ids(tokenizer)}
    shown = follow(dialect, tokenizer, reply(spelled))
    assert not {*tokenizer.encode(shown)} & {*vision_ids(tokenizer)}
    assert follow(dialect, tokenizer, reply(spelled, PICTURE)).count(PAD) == 1


def test_without_native_calls_each_answer_has_its_pictures_after_it() -> None:
    tokenizer = tokenizer_that_sees(seeing())
    dialect = FullDialect(tokenizer, pad=PAD)
    rehearse_dialect(dialect, tokenizer, "all", PAD)
    shown = follow(dialect, tokenizer, reply("one"), reply("two", PICTURE), reply(PICTURE))
    said = f"Tool result:\none\n\nTool result:\ntwo{SHOWN}\n\nTool result:\n{SHOWN}<|im_end|>"
    assert said in shown


def test_a_tokenizer_without_the_token_of_pictures_is_refused() -> None:
    sees, blind = tokenizer_that_sees(seeing()), tokenizer_with(seeing())
    family = make_family(vision_ids(sees))
    assert find_pad(sees, family) == PAD
    assert find_pad(sees, None) == ""
    for tokenizer, token in ((blind, family.image_pad), (sees, 7)):
        other = make_family((4, 5, token, 8))
        with pytest.raises(ConfigError, match=f"token {token} stands for a picture, but the"):
            find_pad(tokenizer, other)
