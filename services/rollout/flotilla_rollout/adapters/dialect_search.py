"""Search for the settings of `[rollout.dialect]` that play a model: every reader of calls, every
parser of vLLM and every renderer is rehearsed on its chat template and tokenizer.

`python -m flotilla_rollout.adapters.dialect_search` does so in a process of its own, because the
caller may have hidden torch, which vLLM's parsers need."""

import json
import logging
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from flotilla_common.images.vision_family import load_vision_family
from flotilla_common.process.child_environment import child_environment
from flotilla_common.process.python_command import python_command
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_common.text.printable_text import print_json
from flotilla_rollout.adapters.dialect_choice import FULL, TEMPLATE, choose_dialect
from flotilla_rollout.adapters.model_files import (
    ModelFiles,
    UnplayedError,
    find_pad,
    find_stop_candidates,
    load_model_tokenizer,
    read_model_folder,
)
from flotilla_rollout.adapters.renderer_choice import renderer_names
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.call_readers import READERS
from flotilla_rollout.dialects.rehearsal import rehearse_dialect
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.thinking import ANSWER, THOUGHT, ThinkingForm
from flotilla_rollout.tokenizer_port import TemplateError

log = get_logger(__name__)

Settings = Mapping[str, str | bool]
_COMMAND = python_command("-m", "flotilla_rollout.adapters.dialect_search")
_REPORT_S = 1.0
# Settings that are written out, besides the first.
_MOST_SHOWN = 8


class Found(NamedTuple):
    """Settings that pass the rehearsal, the best first, out of those `tried`.

    With those in `other_prompt`, the policy reads another prompt than its template's."""

    passed: Sequence[Settings]
    other_prompt: Sequence[Settings]
    tried: int
    vllm: bool


def check_model_folder(folder: Path, policy: PolicyConfig, config: DialectConfig) -> ModelFiles:
    """Read a model's files and rehearse its dialect. Raises ConfigError; where another dialect may
    play the model, it has the settings that do."""
    try:
        return read_model_folder(folder, policy, config)
    except UnplayedError as error:
        raise ConfigError(f"{error}\n{_search_elsewhere(folder, policy, config)}") from error


def _search_elsewhere(folder: Path, policy: PolicyConfig, config: DialectConfig) -> str:
    """Search in another process; return what to tell the user."""
    log.info("the dialect does not play the model: every other one is tried")
    question = {
        "folder": str(folder.resolve()),
        "policy": policy.model_dump(mode="json"),
        "dialect": config.model_dump(mode="json"),
    }
    with tempfile.TemporaryFile() as errors:
        child = subprocess.Popen(
            _COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env=child_environment(ours=True),
        )
        answer: dict[str, Any] = {}
        assert child.stdin is not None and child.stdout is not None
        with child:
            child.stdin.write(json.dumps(question).encode())
            child.stdin.close()
            for line in child.stdout:
                answer = json.loads(line)
                if "of" in answer:
                    log.info("trying dialects", **answer)
        if child.returncode == 0:
            return describe_settings(Found(**answer))
        errors.seek(0)
        last = (errors.read().decode(errors="replace").strip().splitlines() or [""])[-1]
    return f"what plays the model is not known: the search ended with {child.returncode}: {last}"


def find_settings(
    model: str,
    tokenizer: TransformersTokenizer,
    config: DialectConfig,
    extra_stop_ids: Sequence[int] = (),
    *,
    vllm: bool,
    pad: str = "",
    limit: int | None = None,
    report: Callable[[int, int], None] = lambda tried, of: None,
) -> Found:
    """Rehearse every dialect with the other keys of `config`, until `limit` play the model; `vllm`
    includes vLLM's parsers, and `pad` is the token that stands for a picture, if it is shown."""
    remembering = _RememberingTokenizer(tokenizer.fast, tokenizer.template_options)
    candidates = list(_list_candidates(vllm=vllm))
    passed: list[Settings] = []

    def plays(settings: Settings) -> bool:
        each = config.model_copy(update={**_UNSET, **settings})
        with suppress(TemplateError, ConfigError):
            dialect = choose_dialect(model, remembering, each, extra_stop_ids, pad)
            rehearse_dialect(dialect, remembering, config.retention, pad)
            return True
        return False

    for tried, settings in enumerate(candidates):
        report(tried, len(candidates))
        if plays(settings):
            passed.append(settings)
        if len(passed) == limit:
            break
    other: list[Settings] = []
    if all(settings["name"] == FULL for settings in passed):
        renderers = [{"name": name, "own_prompt": True} for name in renderer_names()]
        other = [settings for settings in renderers if plays(settings)]
    if vllm:
        passed = [_add_reasoning(settings, remembering, plays) for settings in passed]
    return Found(passed, other, len(candidates), vllm)


_UNSET: Settings = {"parser": "", "reasoning": "", "own_prompt": False}


def _list_candidates(*, vllm: bool) -> Iterator[Settings]:
    """Yield settings, those that need no other package first."""
    yield {"name": TEMPLATE}
    yield from ({"name": TEMPLATE, "parser": parser} for parser in READERS)
    yield from ({"name": name} for name in renderer_names())
    if vllm:
        from vllm.tool_parsers import ToolParserManager

        # Ours read their families' calls in their place.
        others = [name for name in ToolParserManager.list_registered() if name not in READERS]
        yield from ({"name": TEMPLATE, "parser": parser} for parser in others)
    yield {"name": FULL}


def _add_reasoning(
    settings: Settings, tokenizer: TransformersTokenizer, plays: Callable[[Settings], bool]
) -> Settings:
    """Add the parser of a thinking that the template writes between other marks than `<think>`."""
    from vllm.reasoning import ReasoningParserManager

    from flotilla_rollout.adapters.vllm_call_reader import find_thinking_form

    if not settings.get("parser"):
        return settings
    shown = TemplateDialect(tokenizer).shown_thinking
    before, thought, after = shown.partition(THOUGHT)
    end = after.partition(ANSWER)[0]

    def writes(form: ThinkingForm) -> bool:
        return before.rstrip().endswith(form.open) and form.close in end

    if not thought or writes(ThinkingForm()):
        return settings
    # The parser of the same family, if there are several.
    names = ReasoningParserManager.list_registered()
    for name in sorted(names, key=lambda name: name != settings["parser"]):
        with suppress(ConfigError):
            named = {**settings, "reasoning": name}
            if writes(find_thinking_form(tokenizer, name)) and plays(named):
                return named
    return settings


class _RememberingTokenizer(TransformersTokenizer):
    """A tokenizer that renders each conversation once: all candidates ask for the same ones."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._known: dict[str, str | TemplateError] = {}

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
    ) -> str:
        key = json.dumps([messages, tools, add_generation_prompt])
        if key not in self._known:
            try:
                self._known[key] = super().apply_chat_template(
                    messages, tools, add_generation_prompt
                )
            except TemplateError as error:
                self._known[key] = error
        known = self._known[key]
        if isinstance(known, TemplateError):
            raise TemplateError(str(known))
        return known


def describe_settings(found: Found) -> str:
    """Return what to write into the spec."""
    tried = f"of {found.tried} readers, parsers and renderers"
    left_out = "" if found.vllm else "; vLLM's parsers were not tried: vLLM is not installed here"
    lines: list[str] = []
    if not found.passed:
        lines.append(f"none {tried} plays it{left_out}")
    else:
        first, *others = found.passed
        native = first["name"] != FULL
        how = "plays it" if native else "plays it, without native calls"
        lines += [f"this {how} ({tried}{left_out}):", "[rollout.dialect]"]
        lines += [_write_setting(*each) for each in first.items()]
        if others:
            lines.append(f"and so {_plural(others)}: {_join_settings(others)}")
    if found.other_prompt:
        lines.append(
            "with another prompt than the model's chat template writes:"
            f" {_join_settings(found.other_prompt)}"
        )
    if not found.passed and not found.other_prompt:
        lines.append("set rollout.dialect.chat_template to a template that shows tools and calls")
    return "\n".join(lines)


def _plural(others: Sequence[Settings]) -> str:
    return "does" if len(others) == 1 else "do"


def _join_settings(several: Sequence[Settings]) -> str:
    written = [
        ", ".join(_write_setting(*each) for each in settings.items())
        for settings in several[:_MOST_SHOWN]
    ]
    more = len(several) - len(written)
    return "; ".join([*written, f"{more} more"] if more > 0 else written)


def _write_setting(key: str, value: str | bool) -> str:
    return f"{key} = {json.dumps(value)}"


def main() -> None:
    logging.disable()
    question = json.load(sys.stdin)
    folder, policy = Path(question["folder"]), PolicyConfig(**question["policy"])
    config = DialectConfig(**question["dialect"])
    tokenizer = load_model_tokenizer(folder, policy, config)
    extra = find_stop_candidates(folder, tokenizer)
    reported = time.monotonic()

    def report(tried: int, of: int) -> None:
        nonlocal reported
        if time.monotonic() - reported >= _REPORT_S:
            reported = time.monotonic()
            print_json({"tried": tried, "of": of})

    vllm = find_spec("vllm") is not None
    pad = find_pad(tokenizer, load_vision_family(folder, policy.vision) if policy.vision else None)
    found = find_settings(policy.model, tokenizer, config, extra, vllm=vllm, pad=pad, report=report)
    print_json(found._asdict())


if __name__ == "__main__":
    main()
