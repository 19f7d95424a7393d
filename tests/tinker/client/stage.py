"""A user's folder: a tiny model and tiny data sets under the public names that recipes ask for.

Hugging Face's libraries prefer a folder of a name to the hub, so that no recipe is changed."""

import hashlib
import json
import random
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tests.support.repository import ROOT
from tests.tinker.client.tiny_base import train_base

# The cookbook knows its renderer, `role_colon`, which stops at a string.
MODEL = "Qwen/Qwen3-8B-Base"
RIGHT_ANSWER = 7
TOOL_RENDERER = "qwen3_instruct"
COUNTED_WORD = "until"
_SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
_SOURCES = ("stage.py", "tiny_base.py")
_NAMES = ("Ann", "Ben", "Cem", "Dana")
_THINGS = ("apples", "books", "cups", "doors")

Row = Mapping[str, Any]
Message = Mapping[str, Any]


def find_stage() -> Path:
    """Return the folder, made in about a minute when these sources have changed."""
    sources = b"".join((ROOT / "tests/tinker/client" / name).read_bytes() for name in _SOURCES)
    found = ROOT / f"build/tinker-stage-{hashlib.sha256(sources).hexdigest()[:12]}"
    if not found.exists():
        fresh = found.with_suffix(".partial")
        shutil.rmtree(fresh, ignore_errors=True)
        _make_stage(fresh)
        fresh.rename(found)
    return found


def _make_stage(folder: Path) -> None:
    draw = random.Random(0)
    questions = [_question(draw) for _ in range(256)]
    graded = [{"question": each, "answer": f"#### {RIGHT_ANSWER}"} for each in questions]
    _write(folder, "openai/gsm8k", "main", train=graded, test=graded[:16])
    # 16 batches of the recipes' default size.
    chats = [{"messages": _chat(_question(draw), f"It is {RIGHT_ANSWER}.")} for _ in range(2048)]
    _write(folder, "HuggingFaceH4/no_robots", "default", train=chats, test=chats[:16])
    pairs = [_pair(each) for each in questions]
    _write(folder, "Anthropic/hh-rlhf", "default", train=pairs, test=pairs[:16])
    _write(folder, "zwhe99/DeepMath-103K", "default", train=graded)
    text = [{"text": _page(draw)} for _ in range(400)]
    _write(folder, "Salesforce/wikitext", "wikitext-103-raw-v1", train=text)
    train_base(folder / MODEL, lambda tokenizer: _lessons(tokenizer, draw))


def _question(draw: random.Random) -> str:
    name, thing, count = draw.choice(_NAMES), draw.choice(_THINGS), draw.randint(1, 9)
    return f"{name} has {count} {thing}. How many are left?"


def _chat(question: str, answer: str) -> list[Message]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _pair(question: str) -> Row:
    start = f"\n\nHuman: {question}{_SUFFIX}\n\nAssistant:"
    answers = {"chosen": RIGHT_ANSWER, "rejected": 3}
    return {key: f"{start} \\boxed{{{answer}}}" for key, answer in answers.items()}


def _page(draw: random.Random) -> str:
    return " ".join(draw.choices((*_THINGS, COUNTED_WORD), k=20))


def _write(folder: Path, name: str, config: str, **splits: Sequence[Row]) -> None:
    """Write a data set with a card that names its configuration."""
    place = folder / name
    place.mkdir(parents=True)
    card = ["---", "configs:", f"- config_name: {config}", "  data_files:"]
    for split, rows in splits.items():
        (place / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        card += [f"  - split: {split}", f"    path: {split}.jsonl"]
    (place / "README.md").write_text("\n".join([*card, "---", ""]))


def _lessons(tokenizer: Any, draw: random.Random) -> Iterator[tuple[list[int], list[float]]]:
    """Yield examples without end: ids, and the weight of each as a target.

    The model learns to answer with any digit in a box, and to read a page and report any count:
    what is right is left to the recipes."""
    renderers: Any = import_module("tinker_cookbook.renderers")
    math: Any = import_module("tinker_cookbook.recipes.math_rl.math_env")
    plain = renderers.get_renderer("role_colon", tokenizer)
    calling = renderers.get_renderer(TOOL_RENDERER, tokenizer)
    shots = math.MathEnv.standard_fewshot_prefix()
    while True:
        for before in ([], shots, shots):
            answer = f"\\boxed{{{draw.randint(0, 9)}}}"
            chat = [*before, *_chat(_question(draw) + _SUFFIX, answer)]
            yield _example(plain, chat)
        yield _example(calling, _reading(calling, draw))


def _reading(renderer: Any, draw: random.Random) -> list[Message]:
    """An episode of the recipe `rl_numerics_check`: one page is read, then a count reported."""
    env: Any = import_module("tinker_cookbook.recipes.rl_numerics_check.env")
    base: Any = import_module("tinker_cookbook.renderers.base")
    reader = env.PageReader((), env.EpisodeState())
    tools = [reader.read_page.to_spec()]
    task = env.CountingTaskConfig(num_pages_min=1, num_pages_max=1)
    body = base.ToolCall.FunctionBody(name="read_page", arguments='{"page": 1}')
    prefix = renderer.create_conversation_prefix_with_tools(tools, env.SYSTEM_PROMPT)
    return [
        *prefix,
        {"role": "user", "content": env.build_prompt(task, COUNTED_WORD, 1)},
        {"role": "assistant", "content": "", "tool_calls": [base.ToolCall(function=body)]},
        {"role": "tool", "content": f"[Page 1]\n{_page(draw)}", "name": "read_page"},
        {"role": "assistant", "content": f"Answer: {draw.randint(0, 6)}"},
    ]


def _example(renderer: Any, chat: Sequence[Message]) -> tuple[list[int], list[float]]:
    prompt, weights = renderer.build_supervised_example(list(chat))
    return prompt.to_ints(), weights.tolist()
