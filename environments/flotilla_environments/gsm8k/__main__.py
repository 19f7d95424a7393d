"""Write a task file of questions with a number for an answer.

flotilla gsm8k --from openai/gsm8k --subset main --split train --out FILE
flotilla gsm8k --from train.parquet --out FILE
flotilla gsm8k --from arithmetic --split test --count 192 --out FILE
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flotilla_environments.gsm8k.data_ids import make_question_id
from flotilla_environments.gsm8k.dataset import (
    GENERATED,
    GENERATED_COUNT,
    INSTRUCTION,
    DatasetError,
    Question,
    load_questions,
)

VERSION = "v1"
RULES = ("strict", "flexible")


def make_question_tasks(
    questions: Sequence[Question], split: str, *, env_key: str, rule: str
) -> Iterator[dict[str, Any]]:
    """Make tasks of the questions, in the form of `flotilla_environments.tasks`."""
    verifier = (Path(__file__).parent / "verifiers" / f"{rule}.py").read_text(encoding="utf-8")
    for index, question in enumerate(questions):
        yield {
            "key": f"{env_key}-{split}-{index:06d}",
            "prompt": question.prompt,
            "env_id": env_key,
            "version": VERSION,
            "data_id": make_question_id(split, index, question.answer),
            "data_version": VERSION,
            "verifier_func": verifier,
            "task_modality": "single_turn",
            "env_variables": {},
        }


def _build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="flotilla gsm8k",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--from",
        dest="source",
        required=True,
        help="a .parquet or .jsonl file, the id of a data set of the hub, or `arithmetic` for "
        "generated word problems",
    )
    parser.add_argument("--split", default="train", help="default %(default)s")
    parser.add_argument("--subset", help="folder of the data set, where it has several")
    parser.add_argument(
        "--count",
        type=int,
        help=f"questions, from the first; default all, {GENERATED_COUNT} of `arithmetic`",
    )
    parser.add_argument(
        "--rule",
        choices=RULES,
        default="strict",
        help='what is checked: the number after "####" (strict), or the last number (flexible)',
    )
    parser.add_argument(
        "--instruction",
        help=f"text behind each question; default {INSTRUCTION!r}, none for `arithmetic` and for "
        "prompts that are whole",
    )
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--solutions", type=Path, help="file to write with the answer of each task")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status: 0, or 2 when the data cannot be used."""
    parser = _build_parser()
    options = parser.parse_args(argv)
    if options.count is not None and options.count < 1:
        parser.error("--count must be at least 1")
    if "/" in options.split or not options.split:
        parser.error("--split must be a name such as train")
    try:
        questions = load_questions(
            options.source,
            options.split,
            subset=options.subset,
            count=options.count,
            instruction=options.instruction,
        )
    except DatasetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    env_key = "arithmetic" if options.source == GENERATED else "gsm8k"
    tasks = list(make_question_tasks(questions, options.split, env_key=env_key, rule=options.rule))
    if options.solutions is not None:
        pairs = zip(tasks, questions, strict=True)
        answers = [{"key": task["key"], "answer": f"#### {q.answer}"} for task, q in pairs]
        lines = [json.dumps(each) + "\n" for each in answers]
        options.solutions.parent.mkdir(parents=True, exist_ok=True)
        options.solutions.write_text("".join(lines), encoding="utf-8")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"tasks": tasks}, indent=1) + "\n", encoding="utf-8")
    print(f"{options.out}: {len(tasks)} tasks of split {options.split}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
