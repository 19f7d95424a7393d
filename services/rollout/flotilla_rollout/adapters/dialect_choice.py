"""The dialect of a model, by its name or by the run's config."""

from collections.abc import Sequence
from importlib.util import find_spec

from renderers.base import MODEL_RENDERER_MAP

from flotilla_common.rpc.errors import ConfigError
from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.adapters.renderer_choice import renderer_names
from flotilla_rollout.adapters.renderer_dialect import RendererDialect
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from flotilla_rollout.dialects.call_proof import CallProof
from flotilla_rollout.dialects.call_readers import READERS, CallReader
from flotilla_rollout.dialects.full import FullDialect
from flotilla_rollout.dialects.own_prompt import find_other_prompt
from flotilla_rollout.dialects.rehearsal import rehearse_dialect
from flotilla_rollout.dialects.template import TemplateDialect
from flotilla_rollout.dialects.thinking import ThinkingForm
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError, Tokenizer

log = get_logger(__name__)

AUTO, TEMPLATE, FULL = "auto", "template", "full"


def choose_dialect(
    model: str,
    tokenizer: TransformersTokenizer,
    config: DialectConfig,
    extra_stop_ids: Sequence[int] = (),
    pad: str = "",
) -> Dialect:
    """Return the dialect for `model`; `pad` is the token that stands for a picture, "" if it is
    shown none. Raises ConfigError, and TemplateError if the template cannot
    be played or a renderer writes another prompt than the template."""
    name = config.name
    if name == AUTO:
        # Naming a parser implies the model's own template.
        family = None if config.parser else MODEL_RENDERER_MAP.get(model)
        if family is not None and not config.own_prompt:
            return _choose_of_model(family, tokenizer, config, extra_stop_ids, pad)
        name = family or TEMPLATE
    if name != TEMPLATE and (config.parser or config.reasoning):
        raise ConfigError(
            f"rollout.dialect: parser and reasoning are read with name = {TEMPLATE!r} alone, and"
            f" name is {name!r}"
        )
    if name in (TEMPLATE, FULL) and config.own_prompt:
        raise ConfigError(
            f"rollout.dialect.own_prompt: a renderer has one, and name is {name!r}; leave it out"
        )
    if name == FULL:
        return FullDialect(tokenizer, extra_stop_ids, pad)
    if name == TEMPLATE:
        return _make_template_dialect(tokenizer, config, extra_stop_ids, pad)
    if name not in renderer_names():
        known = ", ".join([AUTO, TEMPLATE, FULL, *renderer_names()])
        raise ConfigError(f"rollout.dialect.name: there is no {name!r}; known: {known}")
    dialect = _make_renderer_dialect(name, tokenizer, config, extra_stop_ids, pad)
    if not config.own_prompt and (
        difference := find_other_prompt(dialect, tokenizer, pictures=bool(pad))
    ):
        raise TemplateError(
            f"rollout.dialect.name: {name!r} writes another prompt than the model's chat template:"
            f" {difference}; name the model's own family, or set rollout.dialect.own_prompt = true"
        )
    return dialect


def _choose_of_model(
    family: str,
    tokenizer: TransformersTokenizer,
    config: DialectConfig,
    extra_stop_ids: Sequence[int],
    pad: str,
) -> Dialect:
    """Return the model's renderer, or its own template where the renderer writes another prompt
    and the template can be played."""
    dialect = _make_renderer_dialect(family, tokenizer, config, extra_stop_ids, pad)
    difference = find_other_prompt(dialect, tokenizer, pictures=bool(pad))
    if not difference:
        return dialect
    try:
        own = _make_template_dialect(tokenizer, config, extra_stop_ids, pad)
        rehearse_dialect(own, tokenizer, config.retention, pad)
        chosen, why = TEMPLATE, "it can be played"
    except TemplateError as error:
        own, chosen, why = dialect, family, f"the template cannot be played: {error}"
    log.warning(
        "the model's renderer writes another prompt than its chat template",
        renderer=family,
        difference=difference,
        chosen=chosen,
        why=why,
    )
    return own


def _make_renderer_dialect(
    name: str,
    tokenizer: TransformersTokenizer,
    config: DialectConfig,
    extra: Sequence[int],
    pad: str,
) -> RendererDialect:
    return RendererDialect(
        tokenizer,
        name,
        config.options,
        extra,
        config.finish,
        config.retention,
        pictures=bool(pad),
    )


def _make_template_dialect(
    tokenizer: TransformersTokenizer,
    config: DialectConfig,
    extra_stop_ids: Sequence[int],
    pad: str,
) -> Dialect:
    if not config.parser:
        if config.reasoning:
            raise ConfigError("rollout.dialect.reasoning: name a rollout.dialect.parser, too")
        return TemplateDialect(
            tokenizer, extra_stop_ids=extra_stop_ids, finish=config.finish, pad=pad
        )
    if config.parser in READERS and not config.reasoning:
        reader = READERS[config.parser]
        return TemplateDialect(tokenizer, reader, extra_stop_ids, finish=config.finish, pad=pad)
    if find_spec("vllm") is None:
        raise TemplateError("rollout.dialect.parser: vLLM, whose parser it is, is not installed")
    from flotilla_rollout.adapters.vllm_call_reader import VllmCallReader, find_thinking_form

    def make_reader(_: Tokenizer, proof: CallProof | None) -> CallReader:
        assert proof is not None
        return VllmCallReader(tokenizer, proof, config.parser)

    form = ThinkingForm()
    if config.reasoning:
        form = find_thinking_form(tokenizer, config.reasoning)
    reader = READERS.get(config.parser, make_reader)
    return TemplateDialect(tokenizer, reader, extra_stop_ids, form, config.finish, pad)
