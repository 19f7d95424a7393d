"""The files of the policy's model: its tokenizer and its dialect."""

from dataclasses import dataclass
from pathlib import Path

from flotilla_common.adapters.model_hub import fetch_files, stage_model
from flotilla_common.images.vision_family import VisionFamily, load_vision_family
from flotilla_common.models.expert_models import check_routing_replay
from flotilla_common.models.multimodal_models import check_trainable_folder
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig, SharedConfig
from flotilla_common.telemetry.log import get_logger
from flotilla_rollout.adapters.dialect_choice import choose_dialect
from flotilla_rollout.adapters.stop_tokens import check_stop_ids, read_eos_ids
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer, load_tokenizer
from flotilla_rollout.config.rollout import DialectConfig, RolloutConfig
from flotilla_rollout.dialects.rehearsal import find_untold, rehearse_dialect
from flotilla_rollout.ports import Dialect
from flotilla_rollout.tokenizer_port import TemplateError

# Tokenizer, chat template and configuration: all that is needed where a service has the weights.
WITHOUT_WEIGHTS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")

log = get_logger(__name__)


class UnplayedError(ConfigError):
    """The configured dialect does not play the model; another one may."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The model's folder, and the parts of it that are read besides the weights."""

    folder: Path
    tokenizer: TransformersTokenizer
    dialect: Dialect
    # How the model reads pictures; None if the policy is shown none.
    vision: VisionFamily | None = None


def read_model_files(shared: SharedConfig, config: RolloutConfig) -> ModelFiles:
    """Fetch the model if necessary, without its weights if a service has them, read its files, and
    rehearse the dialect. Raises ConfigError."""
    model, revision = shared.policy.model, shared.policy.revision
    if config.engine.kind == "tinker":
        folder = fetch_files(model, revision, WITHOUT_WEIGHTS)
    else:
        folder = stage_model(model, revision)
    return read_model_folder(folder, shared.policy, config.dialect)


def read_model_folder(folder: Path, policy: PolicyConfig, config: DialectConfig) -> ModelFiles:
    """Read the model's files from a folder, except its weights, and rehearse the dialect. Raises
    UnplayedError, ConfigError."""
    check_trainable_folder(folder)
    check_routing_replay(policy, folder)
    tokenizer = load_model_tokenizer(folder, policy, config)
    extra = find_stop_candidates(folder, tokenizer)
    vision = load_vision_family(folder, policy.vision) if policy.vision else None
    pad = find_pad(tokenizer, vision)
    try:
        dialect = choose_dialect(policy.model, tokenizer, config, extra, pad)
        rehearse_dialect(dialect, tokenizer, config.retention, pad)
    except TemplateError as error:
        raise UnplayedError(f"policy.model: {error}") from error
    except ConfigError as error:
        raise UnplayedError(str(error)) from error
    check_stop_ids(dialect.stop_ids, folder, trust_remote_code=policy.trust_remote_code)
    if untold := find_untold(dialect, tokenizer):
        log.warning("the prompt leaves out what tools do", left_out=", ".join(untold))
    return ModelFiles(folder, tokenizer, dialect, vision)


def load_model_tokenizer(
    folder: Path, policy: PolicyConfig, config: DialectConfig
) -> TransformersTokenizer:
    """Load the tokenizer of a model, with the chat template of the run. Raises ConfigError."""
    try:
        return load_tokenizer(
            folder,
            trust_remote_code=policy.trust_remote_code,
            template_options=config.options,
            chat_template=config.chat_template,
        )
    except OSError as error:
        raise ConfigError(f"policy.model: {error}") from error


def find_pad(tokenizer: TransformersTokenizer, vision: VisionFamily | None) -> str:
    """Return the token that stands for a picture, as text; "" if the policy is shown none.

    Raises ConfigError if no text is that token alone, or if data could spell it."""
    if vision is None:
        return ""
    pad = tokenizer.decode([vision.image_pad])
    if tokenizer.encode(pad) != [vision.image_pad] or pad not in tokenizer.structure_tokens:
        raise ConfigError(
            f"policy.vision: by config.json token {vision.image_pad} stands for a picture, but the"
            f" tokenizer has no control token of this id (it is {pad!r}): give the model the"
            " tokenizer that it was trained with"
        )
    return pad


def find_stop_candidates(folder: Path, tokenizer: TransformersTokenizer) -> list[int]:
    """Return the ids at which model and tokenizer end a text. Raises ConfigError."""
    return [*read_eos_ids(folder), *tokenizer.eos_ids]
