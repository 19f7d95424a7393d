"""Specs that contradict themselves about a Tinker service are refused with the way out."""

import json
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.spec.config import ConfigError
from flotilla_launcher.cli.spec_start import check_before_start
from flotilla_launcher.run_spec import BadSpecError, parse_spec
from tests.support.launcher import spec

AT_TINKER = {"engine": "tinker"}
PRICES = {"prompt": 0.1, "sample": 0.4, "train": 0.4}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        (
            {"learner": AT_TINKER, "rollout": {"engine": {"kind": "vllm"}}},
            'rollout.engine.kind: "vllm", but with learner.engine = "tinker"',
        ),
        (
            {"rollout": {"engine": {"kind": "tinker"}}},
            'rollout.engine.kind: "tinker" samples what a Tinker service trains; set',
        ),
        (
            {"learner": AT_TINKER, "launcher": {"rollout": {"gpus": 1}}},
            "launcher.rollout.gpus: with",
        ),
        (
            {"learner": AT_TINKER, "launcher": {"learner": {"gpus": 8}}},
            "launcher.learner.gpus: with",
        ),
        (
            {"learner": AT_TINKER, "launcher": {"max_cost": 5.0}},
            "cannot hold without launcher.token_prices",
        ),
        ({"launcher": {"token_prices": PRICES}}, "launcher.token_prices: only a run with"),
        ({"launcher": {"max_tokens": 5}}, "launcher.max_tokens: only a run with"),
    ],
)
def test_what_cannot_hold_together_is_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(BadSpecError) as caught:
        parse_spec(json.dumps(spec(**sections)), "run.toml")
    assert words in str(caught.value)
    assert str(caught.value).startswith("run.toml: ")


def test_a_price_table_is_complete_and_has_no_other_prices() -> None:
    for prices, words in (
        ({"prompt": 0.1, "sample": 0.4}, "launcher.token_prices.train: missing"),
        ({**PRICES, "cache": 0.1}, "launcher.token_prices.cache: unknown key"),
        ({**PRICES, "train": -1}, "launcher.token_prices.train"),
    ):
        launcher = {"token_prices": prices}
        with pytest.raises(ConfigError) as caught:
            parse_spec(json.dumps(spec(learner=AT_TINKER, launcher=launcher)))
        assert words in str(caught.value)


def test_limits_of_dollars_with_prices_and_of_tokens_are_taken() -> None:
    limits = {"max_cost": 5.0, "token_prices": PRICES, "max_tokens": 10**9}
    read = parse_spec(json.dumps(spec(learner=AT_TINKER, launcher=limits)))
    assert read.uses_tinker and read.config.max_tokens == 10**9
    assert not parse_spec(json.dumps(spec())).uses_tinker


@pytest.mark.parametrize("odd", [7, "x", [1], {"engine": 3}, {"engine": "ranks"}])
def test_tables_that_are_none_are_left_to_those_who_read_them(odd: Any) -> None:
    assert not parse_spec(json.dumps(spec(learner=odd, rollout=odd))).uses_tinker


async def test_a_missing_key_is_found_before_anything_is_prepared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wish = spec(learner=AT_TINKER)
    monkeypatch.delenv("TINKER_API_KEY", raising=False)
    with pytest.raises(ConfigError, match=r"TINKER_API_KEY is not set: learner\.engine"):
        await check_before_start(wish, "run.toml", tmp_path)
    monkeypatch.setenv("TINKER_API_KEY", "tml-for-tests")
    await check_before_start(wish, "run.toml", tmp_path)
