"""The dialect of a model, by its name or by the run's config."""

from collections.abc import Sequence

from services.common.errors import ConfigError
from services.rollout.adapters.renderer_dialect import (
    RendererDialect,
    find_renderer,
    renderer_names,
)
from services.rollout.adapters.tokenizer import TransformersTokenizer
from services.rollout.config.rollout import DialectConfig
from services.rollout.dialects.full import FullDialect
from services.rollout.dialects.template import TemplateDialect
from services.rollout.ports import Dialect

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
        name = find_renderer(model) or TEMPLATE
    if name == FULL:
        return FullDialect(tokenizer, extra_stop_ids)
    if name == TEMPLATE:
        return TemplateDialect(tokenizer, extra_stop_ids=extra_stop_ids)
    if name not in renderer_names():
        known = ", ".join([AUTO, TEMPLATE, FULL, *renderer_names()])
        raise ConfigError(f"rollout.dialect.name: there is no {name!r}; known: {known}")
    return RendererDialect(tokenizer, name, config.options, extra_stop_ids)
