"""The dialect of a model, by its name or by the run's config."""

from services.rollout.config.rollout import DialectConfig
from services.rollout.dialects.full import FullDialect
from services.rollout.dialects.template import TemplateDialect
from services.rollout.ports import Dialect, Tokenizer


def choose_dialect(model: str, tokenizer: Tokenizer, config: DialectConfig) -> Dialect:
    """Return the dialect for `model`. Raises TemplateError."""
    if config.name == "full":
        return FullDialect(tokenizer)
    return TemplateDialect(tokenizer)
