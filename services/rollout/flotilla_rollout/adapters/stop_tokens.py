"""Token ids that end a turn, from the model's folder."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flotilla_common.rpc.errors import ConfigError

GENERATION_CONFIG = "generation_config.json"


def read_eos_ids(folder: Path) -> list[int]:
    """Return the ids at which the model's own generation config ends a text.

    There may be more than the tokenizer's: Llama's `<|eom_id|>` ends a turn that calls a tool.
    Raises ConfigError."""
    path = folder / GENERATION_CONFIG
    if not path.is_file():
        return []
    try:
        eos: Any = json.loads(path.read_text()).get("eos_token_id")
    except (ValueError, AttributeError) as error:
        raise ConfigError(f"policy.model: {path} is no JSON object: {error}") from error
    ids: list[Any] = eos if isinstance(eos, list) else [] if eos is None else [eos]
    wrong = [each for each in ids if type(each) is not int]
    if wrong:
        raise ConfigError(f"policy.model: eos_token_id of {path} must be token ids; got {wrong}")
    return ids


def check_stop_ids(stop_ids: Iterable[int], folder: Path, *, trust_remote_code: bool) -> None:
    """Refuse ids that the model cannot sample: its turns would never end by them.

    Raises ConfigError. A folder without config.json is not checked."""
    if not (folder / "config.json").is_file():
        return
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    vocabulary = config.get_text_config().vocab_size
    outside = [each for each in stop_ids if not 0 <= each < vocabulary]
    if outside:
        raise ConfigError(
            f"policy.model: turns end by token {', '.join(map(str, outside))}, and {folder} has a"
            f" vocabulary of {vocabulary}: correct eos_token_id in its {GENERATION_CONFIG}, or give"
            " it the tokenizer that it was trained with"
        )
