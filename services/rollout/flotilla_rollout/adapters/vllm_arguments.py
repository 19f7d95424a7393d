"""Arguments of vLLM that a run gives by name, checked by vLLM's own parser."""

import argparse
import json
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.config import did_you_mean
from flotilla_rollout.adapters.vllm_options import set_environment
from flotilla_rollout.config.rollout import EngineConfig

KEY = "rollout.engine.options"


def check_engine_options(config: EngineConfig) -> str:
    """Check the options if vLLM is installed; else return why they could not be checked.

    Raises ConfigError."""
    if not config.options or config.kind != "vllm":
        return ""
    if find_spec("vllm") is None:
        return f"{KEY} are checked where vLLM is installed"
    set_environment(config, local=False)
    parse_arguments(config.options)
    return ""


def parse_arguments(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options as parsed by vLLM. Raises ConfigError, which lists all faults."""
    if not options:
        return {}
    parser = _make_parser()
    flags = {action.dest: action for action in parser._actions}  # pyright: ignore[reportPrivateUsage]
    parsed: dict[str, Any] = {}
    problems: list[str] = []
    for name, value in options.items():
        if name not in flags:
            problems.append(f"{KEY}.{name}: vLLM has no such argument{_suggest(name, flags)}")
            continue
        try:
            parsed[name] = _parse_one(parser, flags[name], value)
        except ValueError as error:
            problems.append(f"{KEY}.{name}: {error}")
    if problems:
        raise ConfigError("\n  ".join(["vLLM refuses:", *problems]))
    return parsed


def _make_parser() -> argparse.ArgumentParser:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(add_help=False, exit_on_error=False)
    return AsyncEngineArgs.add_cli_args(parser)


def _suggest(name: str, known: Mapping[str, Any]) -> str:
    # A list of all arguments would hide the rest.
    suggestion = did_you_mean(name, list(known))
    return suggestion if suggestion.startswith("; did") else ""


def _parse_one(parser: argparse.ArgumentParser, flag: argparse.Action, value: Any) -> Any:
    """Parse a value as on a command line. Raises ValueError."""
    if (flag.nargs == 0) != isinstance(value, bool):
        expected = "true or false" if flag.nargs == 0 else "no true or false"
        raise ValueError(f"expected {expected}; got {json.dumps(value)}")
    if flag.nargs == 0:
        return value
    try:
        parsed, left = parser.parse_known_args(_make_words(flag, value))
    except argparse.ArgumentError as error:
        raise ValueError(shorten_refusal(error.message)) from error
    if left:
        raise ValueError(f"expected one value; got {json.dumps(value)}")
    return getattr(parsed, flag.dest)


def shorten_refusal(refusal: object) -> str:
    """Return one line of vLLM's message; the rest of pydantic's messages is types and a link."""
    return " ".join(str(refusal).split(" [type=")[0].split())


def _make_words(flag: argparse.Action, value: Any) -> list[str]:
    name = next(option for option in flag.option_strings if option.startswith("--"))
    if isinstance(value, list):
        items: list[Any] = value
        return [name, *(_make_word(item) for item in items)]
    return [f"{name}={_make_word(value)}"]


def _make_word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
