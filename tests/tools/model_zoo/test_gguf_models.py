"""The model of the zoo, converted from GGUF, is the one that was published."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.model_zoo import need_zoo


@cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(str(folder()))


def folder() -> Path:
    return need_zoo("models/smollm2-135m")


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("on 2026", ["on", "Ġ", "2", "0", "2", "6"]),
        # As GPT-2's words, these would be two blanks and two ends of lines.
        ("on  26", ["on", "ĠĠ", "2", "6"]),
        ("on\n\n26", ["on", "ĊĊ", "2", "6"]),
        ("don't  stop", ["don", "'t", "Ġ", "Ġstop"]),
    ],
)
def test_its_tokenizer_splits_digits_from_each_other_and_from_what_is_before_them(
    text: str, tokens: list[str]
) -> None:
    assert tokenizer().tokenize(text) == tokens


def test_its_control_tokens_are_one_token_each_and_its_chat_template_writes_them() -> None:
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    ids = tokenizer().apply_chat_template(chat, return_dict=False, add_generation_prompt=True)
    assert (ids.count(1), ids.count(2)) == (3, 2)
    written = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert tokenizer().decode(ids) == f"{written}<|im_start|>assistant\n"
    assert tokenizer().eos_token_id == 2


def test_any_text_is_read_back() -> None:
    text = "naïve 日本 🙂\r\n\t{'a': [1,  22]}  \x00"
    assert tokenizer().decode(tokenizer().encode(text)) == text


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_it_knows_the_capital_of_france() -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder()), dtype=torch.float32)
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight
    ids = torch.tensor([tokenizer().encode("The capital of France is")])
    written = model.generate(ids, max_new_tokens=1, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer().decode(written) == " Paris"
