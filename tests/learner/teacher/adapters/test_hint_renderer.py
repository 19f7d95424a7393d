"""A hint is rendered as the policy reads messages, without the token that begins a conversation."""

from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from flotilla_common.rpc.errors import ConfigError
from flotilla_environments.tiny_policy.tokenizer import save_tokenizer, train_tokenizer
from flotilla_learner.config.teacher import HintConfig
from flotilla_learner.teacher.adapters.hint_renderer import TemplateRenderer
from tests.support.rank_configs import policy_config

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }}<|im_end|>"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("policy")
    save_tokenizer(train_tokenizer(["find book hotel Rome system user"] * 3, 290), path)
    return path


def load(folder: Path) -> PreTrainedTokenizerFast:
    tokenizer = AutoTokenizer.from_pretrained(str(folder))
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def with_template(folder: Path, out: Path, template: str | None) -> Path:
    """The same tokenizer with a token that begins a conversation, and this template."""
    tokenizer = load(folder)
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.chat_template = template
    tokenizer.save_pretrained(out)
    return out


def test_a_hint_is_a_whole_message_by_the_template(folder: Path) -> None:
    hint = HintConfig(key="solution", role="user")
    renderer = TemplateRenderer(hint, policy_config(folder))
    shown = load(folder).decode(renderer.render_message("book hotel Rome").tolist())
    message = {"role": "user", "content": "book hotel Rome"}
    assert shown == load(folder).apply_chat_template([message], tokenize=False)
    assert "book hotel Rome" in shown


def test_the_token_that_begins_a_conversation_is_left_to_the_attempt(
    folder: Path, tmp_path: Path
) -> None:
    own = with_template(folder, tmp_path / "own", TEMPLATE)
    renderer = TemplateRenderer(HintConfig(key="solution"), policy_config(own))
    assert renderer.first_id == load(own).convert_tokens_to_ids("<s>")
    ids = renderer.render_message("Rome")
    assert renderer.first_id not in ids
    assert load(own).decode(ids.tolist()) == "<|im_start|>system Rome<|im_end|>"


def test_a_template_that_refuses_the_role_is_named(folder: Path, tmp_path: Path) -> None:
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    own = with_template(folder, tmp_path / "own", template)
    renderer = TemplateRenderer(HintConfig(key="solution"), policy_config(own))
    with pytest.raises(ConfigError, match=r"hint\.role: .*no system.*try the other"):
        renderer.render_message("Rome")


def test_a_model_without_a_template_is_refused(folder: Path, tmp_path: Path) -> None:
    own = with_template(folder, tmp_path / "own", None)
    (own / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(ConfigError, match="no chat template"):
        TemplateRenderer(HintConfig(key="solution"), policy_config(own))
