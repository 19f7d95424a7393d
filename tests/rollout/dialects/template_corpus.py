"""Which settings play each chat template of `build/zoo`, as `flotilla doctor` finds them.

`python -m tests.rollout.dialects.template_corpus` searches again, and writes template_corpus.json.
"""

import hashlib
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flotilla_rollout.adapters.dialect_search import Found, find_settings
from flotilla_rollout.adapters.tokenizer import TransformersTokenizer
from flotilla_rollout.config.rollout import DialectConfig
from tests.rollout.dialects import stages
from tests.rollout.dialects.families import FAMILIES
from tests.support.model_zoo import SMALL, make_tokenizer, need_zoo, read_template

TABLE = Path(__file__).with_suffix(".json")
_FOLDERS = ("llama-cpp", "trl")
_END = "</s>"
# What looks like a control token in a template.
_TOKEN = re.compile(
    r"<\|[^<>|\s'\"{}]{1,40}\|?>|<[A-Za-z_:]{1,40}\|>|<\uff5c[^<>\s'\"{}]{1,40}\uff5c>"
    r"|\uff5cDSML\uff5c|\[/?[A-Z_]{3,}\]|\]~!?b\[|\[e~\["
    r"|<SPECIAL_[0-9]+>"
    r"|</?(?:think|tool_calls?|tool_response|arg_key|arg_value|seed:\w+|minimax:tool_call"
    r"|(?:start|end)_of_\w+|sop|assistant)>"
)


@dataclass(frozen=True, slots=True)
class Row:
    """A template by the start of its digest, the first settings that play it, if any do, and the
    renderers that do so with another prompt."""

    name: str
    digest: str
    first: Mapping[str, str]
    other_prompt: Sequence[Mapping[str, Any]]

    @property
    def found(self) -> Found:
        return Found([self.first] if self.first else [], self.other_prompt, 0, True)


@cache
def read_rows() -> Mapping[str, Row]:
    rows: Mapping[str, Any] = json.loads(TABLE.read_text())
    return {name: Row(name, *row) for name, row in rows.items()}


def template_names() -> list[str]:
    """Return the templates that the zoo has, by their paths below `templates/`."""
    folders = {name: need_zoo(f"templates/{name}") for name in _FOLDERS}
    return sorted(f"{name}/{path.name}" for name in _FOLDERS for path in folders[name].iterdir())


def digest_of(name: str) -> str:
    return hashlib.sha256(read_template(name).encode()).hexdigest()[:12]


def tokenizer_of(name: str) -> TransformersTokenizer:
    """Return the tokenizer of the template's family, or a small one with the tokens that the
    template names."""
    family = next((each for each in FAMILIES if each.template == name), None)
    if family is not None:
        return stages.make_tokenizer(family)
    template = read_template(name)
    tokens = sorted({*_TOKEN.findall(template), _END})
    special = {"bos_token": "", "eos_token": _END}
    return TransformersTokenizer(make_tokenizer(SMALL, tokens, template), special)


def search(name: str) -> Row:
    found = find_settings("", tokenizer_of(name), DialectConfig(), vllm=True, limit=1)
    first: Any = found.passed[0] if found.passed else {}
    return Row(name, digest_of(name), first, found.other_prompt)


def main() -> None:
    rows: dict[str, Any] = {}
    for name in template_names():
        row = search(name)
        rows[name] = [row.digest, row.first, row.other_prompt]
        print(name, row.first, file=sys.stderr)
    lines = [f"{json.dumps(name)}: {json.dumps(row)}" for name, row in rows.items()]
    TABLE.write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main()
