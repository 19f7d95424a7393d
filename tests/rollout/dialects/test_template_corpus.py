"""Every chat template of the zoo is played with the settings that a search finds, or refused."""

import tomllib

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.dialect_search import describe_settings
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.call_readers import READERS
from flotilla_rollout.dialects.rehearsal import rehearse_dialect
from flotilla_rollout.tokenizer_port import TemplateError
from tests.rollout.dialects.template_corpus import (
    Row,
    digest_of,
    read_rows,
    search,
    template_names,
    tokenizer_of,
)


def _needs_vllm(row: Row) -> bool:
    return row.first.get("parser", "mistral") not in READERS


# One template of each first setting that needs no vLLM.
_FIRSTS = {
    tuple(row.first.items()): row.name
    for row in read_rows().values()
    if row.first and not _needs_vllm(row)
}


def test_the_table_has_every_template_by_its_digest() -> None:
    names = template_names()
    assert {name: digest_of(name) for name in names} == {
        name: row.digest for name, row in read_rows().items()
    }, "run `python -m tests.rollout.dialects.template_corpus`"


@pytest.mark.parametrize("name", _FIRSTS.values())
def test_a_template_is_played_with_the_first_settings_of_the_table(name: str) -> None:
    tokenizer = tokenizer_of(name)
    config = DialectConfig.model_validate(read_rows()[name].first)
    rehearse_dialect(choose_dialect("", tokenizer, config), tokenizer)


def test_the_user_gets_the_first_settings_or_reads_that_there_are_none() -> None:
    for row in read_rows().values():
        text = describe_settings(row.found)
        if not row.first:
            assert text.startswith("none of ")
            continue
        table = text.partition("\n")[2].partition("\nand so do")[0].partition("\nwith another")[0]
        assert tomllib.loads(table) == {"rollout": {"dialect": row.first}}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", read_rows())
def test_a_search_finds_what_the_table_has_and_nothing_else_plays(name: str) -> None:
    row = read_rows()[name]
    assert search(name) == row
    if row.first == {"name": "template"}:
        return
    tokenizer = tokenizer_of(name)
    with pytest.raises((TemplateError, ConfigError)):
        rehearse_dialect(choose_dialect("", tokenizer, DialectConfig()), tokenizer)
