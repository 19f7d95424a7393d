"""Refused specs, each with a message that names the key; and texts that stay texts."""

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import Field

from flotilla_common.process.arguments import parse_arguments
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import ConfigModel, canonical_json, parse_config
from flotilla_common.spec.spec import parse_shared
from flotilla_common.spec.spec_loading import load_spec


class Optimizer(ConfigModel):
    """A nested section, as services have them."""

    lr: float = 1e-6
    steps: int = Field(default=1, ge=0)
    names: tuple[str, ...] = ()


POLICY = {"model": "m", "max_model_len": 8}


@pytest.mark.parametrize(
    "name",
    ["../../etc", "/etc/passwd", "", "x" * 300, "-x", "a\0b", "a/b", "..", ".", "a\n", "A", "ä"],
)
def test_b52_a_run_name_that_is_no_plain_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        parse_shared({"name": name, "policy": POLICY}, where="spec")


@pytest.mark.parametrize("run_id", ["../../etc", "/etc", "", "x" * 300, "-x", "a\0b", "a/b"])
def test_b52_a_run_id_that_is_no_plain_name_is_refused(
    run_id: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        parse_arguments("learner", Optimizer, "", ["--config", "x", f"--run-id={run_id}"])
    assert caught.value.code == 2
    assert "use up to 128 of a-z 0-9" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ({"lrr": 1e-4}, "lrr: unknown key; did you mean 'lr'"),
        ({"lr": "1e-4"}, "lr: Input should be a valid number; got '1e-4'"),
        ({"lr": True}, "lr: Input should be a valid number"),
        ({"steps": 1.5}, "steps: Input should be a valid integer"),
        ({"steps": -1}, "steps: Input should be greater than or equal to 0; got -1"),
        ({"steps": "1"}, "steps: Input should be a valid integer"),
        ({"steps": None}, "steps: Input should be a valid integer"),
        ({"names": "one"}, "names: Input should be a valid (array|tuple)"),
        ({"names": [1]}, r"names\.0: Input should be a valid string"),
        ([], "."),
    ],
)
def test_b53_unknown_keys_and_wrong_types_are_refused_by_name(given: Any, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        parse_config(Optimizer, given, where="spec")


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_b53_numbers_that_are_none_are_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="lr: must be a finite number"):
        parse_config(Optimizer, {"lr": value}, where="spec")


BOMB = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{new}: &{new} [{','.join([f'*{old}'] * 9)}]\n"
    for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    "text",
    [BOMB, "x: !!python/object/apply:os.system ['touch harmful']", "name: run\n", "- a\n- b\n"],
)
@pytest.mark.parametrize("suffix", ["yaml", "yml", "toml", "json"])
def test_b54_yaml_is_no_spec_whatever_it_would_unfold_to(
    tmp_path: Path, text: str, suffix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"spec.{suffix}"
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(ConfigError, match=r"not (TOML|JSON)"):
        load_spec(path)
    assert time.monotonic() - began < 30
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.json", "[" * 100_000), ("a.json", '{"a":' * 100_000), ("a.toml", "a = " + "[" * 100_000)],
)
def test_b54_nesting_without_end_is_refused(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=r"not (TOML|JSON)"):
        load_spec(tmp_path / name)


@pytest.mark.parametrize("text", ["$(touch harmful)", "`touch harmful`", "${HOME}", "$HOME", "~/x"])
def test_b55_what_a_shell_would_replace_stays_as_it_is(tmp_path: Path, text: str) -> None:
    path = tmp_path / "spec.json"
    path.write_text(json.dumps({"name": "run", "policy": {"model": text}, "list": [text]}))
    spec = load_spec(path, [f"--learner.tasks={text}"])
    assert (spec["policy"]["model"], spec["list"], spec["learner"]["tasks"]) == (text, [text], text)
    assert json.loads(canonical_json(spec)) == spec
    assert os.listdir(tmp_path) == [path.name]
