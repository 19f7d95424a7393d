"""Text of sampled tokens: a tag counts only if its token was sampled, and no space is lost."""

from functools import cache

import pytest
from tokenizers import Tokenizer, decoders, pre_tokenizers, trainers
from tokenizers.models import BPE
from transformers import AddedToken, PreTrainedTokenizerFast

from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.dialects.marked_text import TagMarker, mend_text

TAGS = ("<value>", "</value>", "<value>s")


@cache
def metaspace_tokenizer() -> TransformersTokenizer:
    """Make one like SentencePiece's: a space is part of the next word; a text's first is none."""
    made = Tokenizer(BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue]
    made.decoder = decoders.Metaspace(prepend_scheme="first")  # pyright: ignore[reportAttributeAccessIssue]
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])  # pyright: ignore[reportCallIssue]
    made.train_from_iterator(["a word and another <value> </value> s"] * 5, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=made)
    added: list[str | AddedToken] = [AddedToken(tag) for tag in TAGS]
    fast.add_tokens(added)
    return TransformersTokenizer(fast)


@pytest.mark.parametrize(
    "text", ["word <value> and a word</value> and another", "<value> word", "a"]
)
def test_a_run_behind_a_tag_keeps_its_space(text: str) -> None:
    tokenizer = metaspace_tokenizer()
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert TagMarker(tokenizer, TAGS).mark(ids) == text


def test_a_tag_that_is_spelled_is_shielded_and_one_that_is_sampled_is_not() -> None:
    tokenizer = metaspace_tokenizer()
    spelled = [token for letter in "<value>" for token in tokenizer.encode(f"<value>{letter}")[1:]]
    sampled = tokenizer.encode("<value>")
    ids = [*sampled, *spelled, *tokenizer.encode("</value>")]
    marked = TagMarker(tokenizer, TAGS).mark(ids)
    assert marked.startswith("<value>") and marked.count("<value>") == 1
    assert mend_text(marked) == tokenizer.decode(ids) == "<value><value></value>"
