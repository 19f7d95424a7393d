"""Probe that loads a tokenizer as rollouts do, and compares it with the files that the learner
relies on."""

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from flotilla_common.adapters.hidden_torch import hide_torch
from flotilla_common.process.extras import install_command
from flotilla_launcher.doctor.findings import Finding, fail, first_line, ok
from flotilla_launcher.doctor.probe_process import answer_question

_CANARY = 'A canary {"name": "look", "arguments": {"at": 1}} \u00e9\u4e2d\U0001f600\n\t  1234567 '
_FETCH = "fetch the model again, or save its tokenizer again by save_pretrained"


def compare_tokenizers(question: Mapping[str, Any]) -> list[Finding]:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    try:
        from tokenizers import Tokenizer
        from transformers import AutoTokenizer
    except ImportError as error:
        fix = f"{install_command('rollout-cpu')}, or `make setup`"
        return [fail(f"transformers cannot be imported: {error}", fix)]
    folder = question["folder"]
    try:
        plain = Tokenizer.from_file(f"{folder}/tokenizer.json")
        loaded: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    # tokenizers raises bare Exceptions for whatever is wrong with a file.
    except Exception as error:  # noqa: BLE001
        return [fail(f"{folder}: {first_line(str(error))}", _FETCH)]
    return [*_check_template(loaded, question), *_check_ids(loaded, plain)] or [
        ok("transformers loads the same tokenizer and chat template")
    ]


def _check_template(loaded: Any, question: Mapping[str, Any]) -> list[Finding]:
    template = loaded.chat_template
    if not template and question["replaced"]:
        return []
    if not template:
        fix = "choose an instruction-tuned model, or add a chat_template.jinja to its folder"
        return [fail("the tokenizer has no chat template", fix)]
    digest = hashlib.sha256(template.encode()).hexdigest() if isinstance(template, str) else ""
    if digest == question["chat_template"]:
        return []
    what = (
        "the chat template that rollouts load is not the one that the learner goes by"
        if digest
        else f"there are several chat templates: {', '.join(template)}"
    )
    return [fail(what, "keep one, in chat_template.jinja, and take others out of the folder")]


def _check_ids(loaded: Any, plain: Any) -> list[Finding]:
    """Compare token ids, over all special tokens as well: a token that only one side knows is
    the usual fault."""
    known = {token.content for token in plain.get_added_tokens_decoder().values()}
    added = {token.content for token in loaded.added_tokens_decoder.values()}
    texts = [_CANARY, *sorted(known | added)]
    for text in texts:
        theirs = list(loaded.encode(text, add_special_tokens=False))
        own = list(plain.encode(text, add_special_tokens=False).ids)
        if theirs != own:
            what = f"transformers reads {text[:40]!r} as {theirs[:4]}, tokenizer.json as {own[:4]}"
            return [fail(what, "save the tokenizer again by save_pretrained: its files disagree")]
    return []


if __name__ == "__main__":
    hide_torch()
    answer_question(compare_tokenizers)
