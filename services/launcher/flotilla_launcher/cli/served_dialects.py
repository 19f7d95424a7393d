"""What vLLM's own server is told, so that it reads a policy's turns as its run's dialect does."""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from flotilla_common.rpc.errors import ConfigError


class Parsers(NamedTuple):
    """Names of vLLM's tool parser and reasoning parser; "" for none."""

    calls: str
    thinking: str = ""


# JSON between <tool_call> tags, which is what `template` reads without a parser's name.
_DEFAULT = Parsers("hermes")
# Families of models with a renderer, by `rollout.dialect.name`.
_FAMILIES = {
    "deepseek-v3": Parsers("deepseek_v3"),
    "deepseek-r1": Parsers("deepseek_v3", "deepseek_r1"),
    "deepseek-v4": Parsers("deepseek_v4", "deepseek_v4"),
    "gemma4": Parsers("gemma4", "gemma4"),
    "glm-4.5": Parsers("glm45", "glm45"),
    "glm-5": Parsers("glm47", "glm47"),
    "glm-5.1": Parsers("glm47", "glm47"),
    "glm-5.3": Parsers("glm47", "glm47"),
    "gpt-oss": Parsers("openai", "openai_gptoss"),
    "hy3": Parsers("hy_v3", "hy_v3"),
    "inkling": Parsers("inkling", "inkling"),
    "kimi-k2": Parsers("kimi_k2"),
    "kimi-k2.5": Parsers("kimi_k2", "kimi_k2"),
    "laguna-m.1": Parsers("poolside_v1", "poolside_v1"),
    "laguna-s-2.1": Parsers("poolside_v1", "poolside_v1"),
    "laguna-xs-2.1": Parsers("poolside_v1", "poolside_v1"),
    "laguna-xs.2": Parsers("poolside_v1", "poolside_v1"),
    "llama-3": Parsers("llama3_json"),
    "minimax-m2": Parsers("minimax_m2", "minimax_m2"),
    "nemotron-3": Parsers("qwen3_coder", "nemotron_v3"),
    "nemotron-3-ultra": Parsers("qwen3_coder", "nemotron_v3"),
    "nemotron-3.5": Parsers("qwen3_coder", "nemotron_v3"),
    "prime-qwen3": Parsers("hermes", "qwen3"),
    "qwen3": Parsers("hermes", "qwen3"),
    "qwen3-vl": Parsers("hermes"),
    "qwen3.5": Parsers("qwen3_coder", "qwen3"),
    "qwen3.6": Parsers("qwen3_coder", "qwen3"),
    "qwen3.8": Parsers("qwen3_coder", "qwen3"),
}


def find_parsers(dialect: Mapping[str, Any], family: str = "") -> Parsers:
    """Return the parsers of a run's `[rollout.dialect]`; `family` is that of its model, if "auto"
    finds one. Raises ConfigError for a family whose parsers are not known."""
    name, parser = dialect.get("name", "auto"), dialect.get("parser", "")
    if parser:
        return Parsers(parser, dialect.get("reasoning", ""))
    name = (family or "template") if name == "auto" else name
    if name in ("template", "full"):
        return _DEFAULT
    if name not in _FAMILIES:
        raise ConfigError(
            f"rollout.dialect.name: no parser of vLLM is known for {name!r}: name one with"
            " --vllm-args '--tool-call-parser NAME'"
        )
    return _FAMILIES[name]


def serving_options(spec: Mapping[str, Any], family: str = "") -> list[str]:
    """Return the options of vLLM for the policy of a run's spec: window, dtype, chat template and
    parsers. Raises ConfigError."""
    policy, dialect = spec["policy"], spec.get("rollout", {}).get("dialect", {})
    parsers = find_parsers(dialect, family)
    words = ["--max-model-len", str(policy["max_model_len"])]
    words += ["--dtype", policy.get("dtype", "bfloat16"), "--tool-call-parser", parsers.calls]
    if parsers.thinking:
        words += ["--reasoning-parser", parsers.thinking]
    if template := dialect.get("chat_template"):
        words += ["--chat-template", template]
    if options := dialect.get("options"):
        words += ["--default-chat-template-kwargs", json.dumps(options)]
    if policy.get("trust_remote_code"):
        words += ["--trust-remote-code"]
    if policy.get("vision"):
        words += ["--no-language-model-only"]
    engine = spec.get("rollout", {}).get("engine", {})
    if engine.get("enforce_eager", engine.get("device") == "cpu"):
        words += ["--enforce-eager"]
    if workers := engine.get("tensor_parallel"):
        words += ["--tensor-parallel-size", str(workers)]
    return words


def is_explained(spec: Mapping[str, Any]) -> bool:
    """Return whether the run's dialect explained the tools in a system message of its own, which
    the model's chat template does not write."""
    return spec.get("rollout", {}).get("dialect", {}).get("name") == "full"
