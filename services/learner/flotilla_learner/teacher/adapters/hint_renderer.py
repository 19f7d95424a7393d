"""Messages that only the teacher is shown, as token ids by the policy's own chat template."""

from typing import Any, cast

import numpy as np
from jinja2 import TemplateError
from numpy.typing import NDArray
from transformers import AutoTokenizer

from flotilla_common.adapters.model_hub import fetch_files
from flotilla_common.rpc.errors import ConfigError
from flotilla_common.spec.spec import PolicyConfig
from flotilla_learner.config.teacher import HintConfig

_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "config.json")


class TemplateRenderer:
    """Renders one message by a model's template. Implements `ports.HintRenderer`."""

    def __init__(self, hint: HintConfig, policy: PolicyConfig) -> None:
        """Load the tokenizer. Raises ConfigError."""
        code = ["*.py"] if policy.trust_remote_code else []
        folder = fetch_files(policy.model, policy.revision, [*_FILES, *code])
        # The library's types are unknown.
        self._tokenizer = cast(
            "Any",
            AutoTokenizer.from_pretrained(
                str(folder), trust_remote_code=policy.trust_remote_code, use_fast=True
            ),
        )
        self._role = hint.role
        if not self._tokenizer.chat_template:
            raise ConfigError(
                f"learner.teacher.hint: policy.model {policy.model!r} has no chat template, which"
                " would render the teacher's message; leave the table out"
            )

    @property
    def first_id(self) -> int | None:
        return self._tokenizer.bos_token_id

    def render_message(self, text: str) -> NDArray[np.int32]:
        """Render a message with this text; without the token that begins a conversation. Raises
        ConfigError."""
        message = {"role": self._role, "content": text}
        try:
            shown = self._tokenizer.apply_chat_template([message], tokenize=False)
        except TemplateError as error:
            raise ConfigError(
                f"learner.teacher.hint.role: the policy's chat template renders no {self._role}"
                f" message by itself ({error}); try the other of system and user"
            ) from error
        ids = np.array(self._tokenizer.encode(shown, add_special_tokens=False), np.int32)
        return ids[1:] if len(ids) and ids[0] == self.first_id else ids
