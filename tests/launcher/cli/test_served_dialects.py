"""vLLM's options for the policy of a run."""

import ast
import json
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_launcher.cli.adapters.model_families import find_family
from flotilla_launcher.cli.served_dialects import find_parsers, is_explained, serving_options
from flotilla_rollout.adapters.renderer_choice import renderer_names


def spec(dialect: dict[str, Any], **policy: Any) -> dict[str, Any]:
    policy = {"model": "m", "max_model_len": 512, "dtype": "float32", **policy}
    return {"policy": policy, "rollout": {"dialect": dialect, "engine": {"device": "cpu"}}}


@pytest.mark.parametrize(
    ("dialect", "model", "parsers"),
    [
        ({"name": "template", "finish": "done"}, "build/tiny-0", ("hermes", "")),
        ({"name": "full"}, "Qwen/Qwen3-4B", ("hermes", "")),
        ({}, "Qwen/Qwen3-4B", ("hermes", "qwen3")),
        ({}, "somebody/a-model", ("hermes", "")),
        ({"name": "gpt-oss"}, "build/mine", ("openai", "openai_gptoss")),
        ({"parser": "mistral"}, "Qwen/Qwen3-4B", ("mistral", "")),
        ({"parser": "glm45", "reasoning": "glm45"}, "build/mine", ("glm45", "glm45")),
    ],
)
def test_calls_and_thinking_are_read_as_the_runs_dialect_reads_them(
    dialect: dict[str, Any], model: str, parsers: tuple[str, str]
) -> None:
    assert find_parsers(dialect, find_family(model)) == parsers


def test_window_template_and_its_variables_are_those_of_the_run() -> None:
    dialect = {"name": "qwen3", "chat_template": "a.jinja", "options": {"enable_thinking": False}}
    words = serving_options(spec(dialect, vision={}, trust_remote_code=True))
    given = dict(pairwise(words))
    assert (given["--max-model-len"], given["--dtype"]) == ("512", "float32")
    assert (given["--chat-template"], given["--reasoning-parser"]) == ("a.jinja", "qwen3")
    assert json.loads(given["--default-chat-template-kwargs"]) == {"enable_thinking": False}
    assert {"--trust-remote-code", "--enforce-eager"} <= set(words)
    assert is_explained(spec({"name": "full"})) and not is_explained(spec(dialect))


def test_a_family_without_a_known_parser_is_refused_with_the_option_that_names_one() -> None:
    with pytest.raises(ConfigError, match=r"'qwen9'.*--tool-call-parser NAME"):
        find_parsers({"name": "qwen9"})


def _registered(package: str, table: str) -> set[str]:
    """Return the names in a table of vLLM's source: importing it takes a minute of a slow core."""
    found = find_spec("vllm")
    assert found is not None and found.origin is not None
    source = (Path(found.origin).parent / package / "__init__.py").read_text()
    (names,) = [
        {ast.literal_eval(key) for key in each.value.keys if key is not None}
        for each in ast.walk(ast.parse(source))
        if isinstance(each, ast.Assign)
        and isinstance(each.value, ast.Dict)
        and ast.unparse(each.targets[0]) == table
    ]
    return names


def test_every_family_of_the_rollout_has_parsers_that_vllm_has() -> None:
    calls = _registered("tool_parsers", "_TOOL_PARSERS_TO_REGISTER")
    thinking = _registered("reasoning", "_REASONING_PARSERS_TO_REGISTER")
    for family in renderer_names():
        parsers = find_parsers({"name": family})
        assert parsers.calls in calls, family
        assert parsers.thinking in ("", *thinking), family
