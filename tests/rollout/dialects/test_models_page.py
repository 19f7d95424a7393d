"""The page of models agrees with the tests."""

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.rehearsal import rehearse_dialect
from flotilla_rollout.tokenizer_port import TemplateError
from tests.rollout.dialects.families import REFUSALS, Refusal
from tests.rollout.dialects.models_page import PAGE, write_page
from tests.support.model_zoo import SMALL, make_tokenizer, read_template

# vLLM takes ten seconds to import, and what it and torch warn about then is theirs to mend.
_BY_VLLM = (pytest.mark.slow, pytest.mark.filterwarnings("default"))
_REFUSALS = [
    pytest.param(each, id=each.models, marks=_BY_VLLM if each.parser else ()) for each in REFUSALS
]


def _rehearse(refusal: Refusal, name: str) -> None:
    template = read_template(refusal.template)
    fast = make_tokenizer(SMALL, (*refusal.control_tokens, refusal.ends), template)
    tokenizer = TransformersTokenizer(fast, {"bos_token": "", "eos_token": refusal.ends})
    parser = refusal.parser if name == "template" else ""
    dialect = choose_dialect("", tokenizer, DialectConfig(name=name, parser=parser))
    rehearse_dialect(dialect, tokenizer)


def test_the_page_is_what_the_table_makes() -> None:
    assert PAGE.read_text() == write_page(), "run `python -m tests.rollout.dialects.models_page`"


@pytest.mark.parametrize("refusal", _REFUSALS)
def test_a_model_is_refused_with_the_message_on_the_page(refusal: Refusal) -> None:
    with pytest.raises((TemplateError, ConfigError)) as raised:
        _rehearse(refusal, "template")
    assert refusal.message in str(raised.value)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda each: each.models)
def test_a_refused_model_is_played_in_full_where_the_page_states_so(refusal: Refusal) -> None:
    if refusal.plays_full:
        _rehearse(refusal, "full")
        return
    with pytest.raises(TemplateError):
        _rehearse(refusal, "full")
