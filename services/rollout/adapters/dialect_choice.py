"""The dialect of a model, by its name or by the run's config."""

from collections.abc import Sequence
from importlib.util import find_spec

from renderers.base import MODEL_RENDERER_MAP

from services.common.errors import ConfigError
from services.rollout.adapters.renderer_choice import renderer_names
from services.rollout.adapters.renderer_dialect import RendererDialect
from services.rollout.adapters.tokenizer import TransformersTokenizer
from services.rollout.config.rollout import DialectConfig
from services.rollout.dialects.call_proof import CallProof
from services.rollout.dialects.call_readers import READERS, CallReader
from services.rollout.dialects.full import FullDialect
from services.rollout.dialects.template import TemplateDialect
from services.rollout.dialects.thinking import ThinkingForm
from services.rollout.ports import Dialect, TemplateError, Tokenizer

AUTO, TEMPLATE, FULL = "auto", "template", "full"


def choose_dialect(
    model: str,
    tokenizer: TransformersTokenizer,
    config: DialectConfig,
    extra_stop_ids: Sequence[int] = (),
) -> Dialect:
    """Return the dialect for `model`. Raises ConfigError and TemplateError."""
    name = config.name
    if name == AUTO:
        # Naming a parser implies the model's own template.
        name = (None if config.parser else MODEL_RENDERER_MAP.get(model)) or TEMPLATE
    if name != TEMPLATE and (config.parser or config.reasoning):
        raise ConfigError(
            f"rollout.dialect: parser and reasoning are read with name = {TEMPLATE!r} alone, and"
            f" name is {name!r}"
        )
    if name == FULL:
        return FullDialect(tokenizer, extra_stop_ids)
    if name == TEMPLATE:
        return _make_template_dialect(tokenizer, config, extra_stop_ids)
    if name not in renderer_names():
        known = ", ".join([AUTO, TEMPLATE, FULL, *renderer_names()])
        raise ConfigError(f"rollout.dialect.name: there is no {name!r}; known: {known}")
    return RendererDialect(
        tokenizer, name, config.options, extra_stop_ids, config.finish, config.retention
    )


def _make_template_dialect(
    tokenizer: TransformersTokenizer, config: DialectConfig, extra_stop_ids: Sequence[int]
) -> Dialect:
    if not config.parser:
        if config.reasoning:
            raise ConfigError("rollout.dialect.reasoning: name a rollout.dialect.parser, too")
        return TemplateDialect(tokenizer, extra_stop_ids=extra_stop_ids, finish=config.finish)
    if config.parser in READERS and not config.reasoning:
        reader = READERS[config.parser]
        return TemplateDialect(tokenizer, reader, extra_stop_ids, finish=config.finish)
    if find_spec("vllm") is None:
        raise TemplateError("rollout.dialect.parser: vLLM, whose parser it is, is not installed")
    from services.rollout.adapters.vllm_call_reader import VllmCallReader, find_thinking_form

    def make_reader(_: Tokenizer, proof: CallProof | None) -> CallReader:
        assert proof is not None
        return VllmCallReader(tokenizer, proof, config.parser)

    form = ThinkingForm()
    if config.reasoning:
        form = find_thinking_form(tokenizer, config.reasoning)
    reader = READERS.get(config.parser, make_reader)
    return TemplateDialect(tokenizer, reader, extra_stop_ids, form, config.finish)
