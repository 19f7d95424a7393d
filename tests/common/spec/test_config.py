"""Specs from files and overrides, and the reports of their mistakes."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field, ValidationError, model_validator

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, canonical_json, find_tables, parse_config
from flotilla_common.spec.spec import SharedConfig, parse_shared
from flotilla_common.spec.spec_loading import apply_override, load_spec


class Engine(ConfigModel):
    max_num_seqs: int = Field(default=64, ge=1)
    dtype: Literal["float32", "bfloat16"] = "float32"


class Backend(ConfigModel):
    url: str
    folder: Path = Path("x")


class Config(ConfigModel):
    engine: Engine = Engine()
    backends: tuple[Backend, ...] = ()
    by_name: dict[str, Backend] = Field(default_factory=dict[str, Backend])
    lr: float = 1e-4
    api_key: int = 0


def spec_file(folder: Path, text: str, name: str = "spec.toml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_a_spec_is_read_with_overrides_and_its_seed_filled_in(tmp_path: Path) -> None:
    path = spec_file(
        tmp_path,
        'seed = 3\n[policy]\nmodel = "runs/tiny-{seed}"\n'
        '[[prepare]]\ncommand = ["a", "--seed={seed}"]',
    )
    spec = load_spec(
        path,
        [
            "--seed=7",
            "--rollout.engine.max_num_seqs=128",
            "--rollout.name=plain text",
            "--rollout.on=true",
            "--rollout.lr=1e-4",
            "--rollout.stops=['a', 'b']",
            "--prepare.0.message=now {seed}",
        ],
    )
    assert spec["policy"]["model"] == "runs/tiny-7"
    assert spec["prepare"] == [{"command": ["a", "--seed=7"], "message": "now 7"}]
    assert spec["rollout"] == {
        "engine": {"max_num_seqs": 128},
        "name": "plain text",
        "on": True,
        "lr": 1e-4,
        "stops": ["a", "b"],
    }


def test_json_and_toml_mean_the_same(tmp_path: Path) -> None:
    toml = load_spec(spec_file(tmp_path, "seed = 1\n[policy]\nmax_model_len = 5"))
    text = '{"policy": {"max_model_len": 5}, "seed": 1}'
    assert toml == load_spec(spec_file(tmp_path, text, "spec.json"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.toml", "seed = ", "not TOML"),
        ("a.json", "{", "not JSON"),
        ("a.json", "[1]", "top level must be a table"),
        ("a.json", "[" * 100_000, "not JSON"),
        ("a.json", '{"lr": NaN}', "lr: must be a finite number"),
        ("a.toml", "when = 2026-01-01", "when: write dates and times as quoted strings"),
    ],
)
def test_a_broken_file_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load_spec(spec_file(tmp_path, text, name))
    assert name in str(caught.value)


def test_a_missing_file_and_foreign_bytes_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none\.toml: No such file"):
        load_spec(tmp_path / "none.toml")
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8"):
        load_spec(binary)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("--seed", "write --section.key=value"),
        ("--=1", "write --section.key=value"),
        ("--a..b=1", "write --section.key=value"),
        ("--seed.x=1", "seed is a value, not a table"),
        ("--prepare.4.x=1", "not one of the 1 indices"),
    ],
)
def test_an_override_that_fits_nowhere_is_named(
    tmp_path: Path, override: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load_spec(spec_file(tmp_path, 'seed = 1\nprepare = ["x"]'), [override])


def test_every_problem_is_listed_with_its_key_and_a_guess() -> None:
    data = {
        "engine": {"max_num_seq": 3, "dtype": "float16"},
        "backends": [{"ur": "x"}],
        "by_name": {"a": {"url": "x", "foldr": "y"}},
        "lr": "1e-4",
        "api_key": "sk-live-SECRET",
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(Config, data, where="spec.toml [rollout]")
    text = str(caught.value)
    assert text.startswith("spec.toml [rollout]: 7 problems")
    assert "engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?" in text
    assert "engine.dtype: Input should be 'float32' or 'bfloat16'; got 'float16'" in text
    assert "backends.0.url: missing" in text
    assert "backends.0.ur: unknown key; did you mean 'url'?" in text
    assert "by_name.a.foldr: unknown key; did you mean 'folder'?" in text
    assert "lr: Input should be a valid number; got '1e-4'" in text
    assert "api_key: " in text
    assert "SECRET" not in text


def test_keys_are_named_as_one_types_them_from_the_top_of_the_spec() -> None:
    data: Any = {"engine": {"max_num_seqs": 0}, "lr": "x"}
    with pytest.raises(ConfigError) as caught:
        parse_config(Config, data, where="spec.toml", section="rollout")
    assert "\n  rollout.engine.max_num_seqs: Input should be" in str(caught.value)
    assert "\n  rollout.lr: Input should be a valid number" in str(caught.value)
    wrong: Any
    for wrong in (3, [1]):
        with pytest.raises(ConfigError, match="rollout: expected a table; got"):
            parse_config(Config, wrong, where="spec.toml", section="rollout")


class Pair(ConfigModel):
    low: int = 0
    high: int = 1

    @model_validator(mode="after")
    def _ordered(self) -> "Pair":
        if self.low > self.high:
            raise ValueError(f"low: {self.low} is above high")
        return self


class Pairs(ConfigModel):
    pair: Pair = Pair()


def test_a_check_of_a_whole_table_names_its_key_too() -> None:
    with pytest.raises(ConfigError, match=r"\n  a\.pair\.low: 3 is above high"):
        parse_config(Pairs, {"pair": {"low": 3}}, where="spec", section="a")


class Named(ConfigModel):
    by_name: Mapping[str, Pair] = {}
    several: Mapping[str, tuple[Pair, ...]] = {}
    either: Pair | None = None


def test_a_hint_below_a_mapping_knows_the_keys_of_its_tables() -> None:
    data: Any = {
        "by_name": {"a": {"hgh": 2}},
        "several": {"b": [{"lw": 1}]},
        "either": {"by_name": 1},
    }
    with pytest.raises(ConfigError) as caught:
        parse_config(Named, data, where="spec")
    text = str(caught.value)
    assert "by_name.a.hgh: unknown key; did you mean 'high'?" in text
    assert "several.b.0.lw: unknown key; did you mean 'low'?" in text
    assert "either.by_name: unknown key; known: high, low" in text


def test_tables_are_found_below_lists_mappings_and_unions() -> None:
    found = {
        (f"{name}{rest}", table)
        for name, field in Named.model_fields.items()
        for rest, table in find_tables(field.annotation)
    }
    assert found == {("by_name.NAME", Pair), ("several.NAME.0", Pair), ("either", Pair)}


def test_lists_become_tuples_and_strings_paths() -> None:
    config = parse_config(
        Config, {"backends": [{"url": "u", "folder": "/x"}], "lr": 1}, where="spec"
    )
    assert config.backends == (Backend(url="u", folder=Path("/x")),)
    assert config.lr == 1.0


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(ValidationError):
        parse_config(Config, {}, where="spec").lr = 2.0


def test_the_shared_part_ignores_other_sections_and_refuses_unknown_ones() -> None:
    spec: dict[str, Any] = {
        "name": "tiny",
        "policy": {"model": "m", "max_model_len": 8},
        "rollout": {"anything": 1},
    }
    assert parse_shared(spec, where="spec").policy.model == "m"
    with pytest.raises(ConfigError, match="rolout: unknown key; did you mean 'rollout'"):
        parse_shared({**spec, "rolout": {}}, where="spec")


@pytest.mark.parametrize("name", ["../../etc", "/etc", "", "x" * 64, "-x", "a\0b", "A"])
def test_a_name_that_could_leave_its_folder_is_refused(name: str) -> None:
    data = {"name": name, "policy": {"model": "m", "max_model_len": 8}}
    with pytest.raises(ConfigError, match="name: "):
        parse_config(SharedConfig, data, where="spec")


scalars = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text()
tables = st.dictionaries(st.text(), st.recursive(scalars, st.lists, max_leaves=5), max_size=4)


@given(tables)
def test_the_canonical_text_does_not_depend_on_order(
    data: dict[str, Any],
) -> None:
    text = canonical_json(data)
    assert json.loads(text) == data
    assert canonical_json(dict(reversed(data.items()))) == text


@given(tables)
def test_whatever_the_data_parsing_ends_in_a_config_or_a_config_error(data: dict[str, Any]) -> None:
    try:
        parse_config(Config, data, where="spec")
    except ConfigError as error:
        assert str(error).startswith("spec: ")


@given(st.text(st.characters(blacklist_categories=("Cs",))))
def test_an_override_of_any_text_arrives_as_a_value(text: str) -> None:
    spec: dict[str, Any] = {}
    apply_override(spec, f"--a.b={text}")
    value = spec["a"]["b"]
    assert list(spec) == ["a"]
    assert isinstance(value, str | int | float | bool | list | dict)
