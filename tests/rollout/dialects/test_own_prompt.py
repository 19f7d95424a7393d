"""A renderer writes the prompt of the model's own chat template, or the spec says otherwise."""

from typing import Any

import pytest
from renderers.base import MODEL_RENDERER_MAP
from structlog.testing import capture_logs

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.renderer_dialect import RendererDialect
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError
from tests.rollout.dialects.families import FAMILIES, Family

_BY_NAME = {family.name: family for family in FAMILIES}
_RENDERED = [family for family in FAMILIES if family.dialect != "template"]


def choose(family: Family, name: str, model: str = "", **changes: Any) -> Dialect:
    options = dict(family.options)
    config = DialectConfig(name=name, options=options, **changes)
    special = {"bos_token": family.begin, "eos_token": family.ends[0]}
    tokenizer = TransformersTokenizer(family.make_tokenizer(), {**special, **options})
    return choose_dialect(model, tokenizer, config)


def test_a_renderer_of_another_family_is_refused_at_the_first_difference() -> None:
    qwen = _BY_NAME["Qwen3"]
    with pytest.raises(TemplateError) as refused:
        choose(qwen, "nemotron-3")
    message = str(refused.value)
    assert "'nemotron-3' writes another prompt than the model's chat template" in message
    assert "You have access to the following functions" in message
    assert "You may call one or more functions" in message
    assert "at token" in message and "own_prompt = true" in message
    assert isinstance(choose(qwen, "nemotron-3", own_prompt=True), RendererDialect)


@pytest.mark.parametrize("family", _RENDERED, ids=lambda each: each.name)
def test_a_family_needs_the_key_where_the_page_states_so(family: Family) -> None:
    if not family.own_prompt:
        choose(family, family.dialect)
        return
    with pytest.raises(TemplateError, match="writes another prompt"):
        choose(family, family.dialect)


def test_a_renderer_that_differs_in_an_answer_alone_is_refused() -> None:
    """Qwen3.6's renderer writes the prompt of Qwen3.5, and another true in a call."""
    qwen = _BY_NAME["Qwen3.5"]
    with pytest.raises(TemplateError, match=r"(?i)true.* instead of .*true"):
        choose(qwen, "qwen3.6")


@pytest.mark.parametrize(
    ("family", "model"),
    [(each, name) for each in _RENDERED for name in each.models if name in MODEL_RENDERER_MAP],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_auto_plays_every_model_with_its_renderer_and_reports_another_prompt(
    family: Family, model: str
) -> None:
    with capture_logs() as logs:
        dialect = choose(family, "auto", model)
    assert isinstance(dialect, RendererDialect)
    assert [line["chosen"] for line in logs] == [family.dialect] * family.own_prompt
    assert all("instead of" in line["difference"] for line in logs)


def test_auto_prefers_a_template_that_the_renderer_does_not_write() -> None:
    qwen = _BY_NAME["Qwen2.5"]
    with capture_logs() as logs:
        dialect = choose(qwen, "auto", "Qwen/Qwen3-8B")
    assert isinstance(dialect, TemplateDialect)
    assert [(line["renderer"], line["chosen"]) for line in logs] == [("qwen3", "template")]
    accepted = choose(qwen, "auto", "Qwen/Qwen3-8B", own_prompt=True)
    assert isinstance(accepted, RendererDialect)


def test_only_a_renderer_has_a_prompt_of_its_own() -> None:
    for name in ("template", "full"):
        with pytest.raises(ConfigError, match=f"own_prompt: a renderer has one.*{name}"):
            choose(_BY_NAME["Qwen3"], name, own_prompt=True)
