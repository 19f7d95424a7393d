"""Options are read by vLLM's own parser: unknown and refused ones are named."""

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

import pytest

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_rollout.adapters import vllm_arguments
from flotilla_rollout.adapters.vllm_arguments import check_engine_options, parse_arguments
from flotilla_rollout.adapters.vllm_options import ServedModel, set_environment
from flotilla_rollout.adapters.vllm_start import start_engines
from flotilla_rollout.config.engine_options import OWN_KEYS, REASONS
from flotilla_rollout.config.rollout import EngineConfig
from tests.support.tiny_model import make_model


def make_parser() -> argparse.ArgumentParser:
    """A parser with arguments of every kind in vLLM's."""
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    parser.add_argument("--moe-backend", choices=["auto", "triton"])
    parser.add_argument("--max-logprobs", type=int)
    parser.add_argument("--enable-expert-parallel", action=argparse.BooleanOptionalAction)
    parser.add_argument("--disable-log-stats", action="store_true")
    parser.add_argument("--cudagraph-capture-sizes", "-cs", type=int, nargs="+")
    parser.add_argument("--compilation-config", "-cc", type=json.loads)
    return parser


TAKEN: dict[str, Any] = {
    "moe_backend": "triton",
    "max_logprobs": 5,
    "enable_expert_parallel": False,
    "disable_log_stats": False,
    "cudagraph_capture_sizes": [1, 2],
}
REFUSED = [
    ("moe_backends", "triton", "vLLM has no such argument; did you mean 'moe_backend'?"),
    ("nonsense_without_kin", 1, "vLLM has no such argument"),
    ("moe_backend", "magic", "invalid choice: 'magic'"),
    ("max_logprobs", "many", "invalid int value: 'many'"),
    ("max_logprobs", [5, 6], "expected one value; got [5, 6]"),
    ("max_logprobs", True, "expected no true or false; got true"),
    ("enable_expert_parallel", 1, "expected true or false; got 1"),
    ("disable_log_stats", "no", 'expected true or false; got "no"'),
]


def check_parser() -> None:
    """Check the options that the given parser takes and refuses."""
    assert parse_arguments(TAKEN) == TAKEN
    for name, value, message in REFUSED:
        with pytest.raises(ConfigError) as caught:
            parse_arguments({name: value})
        assert f"rollout.engine.options.{name}: {message}" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        parse_arguments({name: value for name, value, _ in REFUSED})
    assert len(str(caught.value).splitlines()[1:]) == len({name for name, _, _ in REFUSED})


def test_a_value_is_taken_or_refused_as_the_parser_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_arguments, "_make_parser", make_parser)
    check_parser()


def test_options_are_left_unchecked_where_vllm_is_not_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(vllm_arguments, "find_spec", lambda name: None)
    unseen = check_engine_options(EngineConfig(options={"nonsense": 1}))
    assert unseen == "rollout.engine.options are checked where vLLM is installed"
    assert check_engine_options(EngineConfig()) == ""


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.filterwarnings("default")
def test_vllms_own_parser_is_used_and_knows_all_that_is_refused() -> None:
    set_environment(EngineConfig(device="cpu"), local=True)
    check_parser()
    compiled = parse_arguments({"compilation_config": {"mode": 0}})["compilation_config"]
    assert type(compiled).__name__ == "CompilationConfig"
    with pytest.raises(ConfigError, match=r"options\.compilation_config: .* nonsense"):
        parse_arguments({"compilation_config": {"nonsense": 0}})

    from dataclasses import fields

    from vllm.engine.arg_utils import AsyncEngineArgs

    assert {*OWN_KEYS, *REASONS} <= {field.name for field in fields(AsyncEngineArgs)}


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.filterwarnings("default")
async def test_options_reach_vllm_which_refuses_what_does_not_go_together(tmp_path: Path) -> None:
    make_model(tmp_path)
    config = EngineConfig(device="cpu", options={"long_prefill_token_threshold": 4096})
    policy = PolicyConfig(model=str(tmp_path), dtype="float32", max_model_len=1024)
    with pytest.raises(ConfigError, match=r"rollout\.engine: vLLM refuses it: .*long_prefill"):
        await start_engines(config, ServedModel(tmp_path, policy, ()))
    assert not multiprocessing.active_children()
