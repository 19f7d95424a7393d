"""Sources of questions: a parquet or JSONL file, a data set on the hub, or a generator.

Two sets of columns are read. GSM8K's: `question`, and `answer` with the number after "####". And
the training data's of SkyRL and verl: `prompt`, a list of one user message, and the expected
answer as `ground_truth` in `reward_spec` or `reward_model`.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

from flotilla_environments.gsm8k import arithmetic, hub
from flotilla_environments.gsm8k.data_ids import NUMBER
from flotilla_environments.gsm8k.verifiers.strict import marked_number

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
GENERATED = "arithmetic"
GENERATED_COUNT = 1_200
SUFFIXES = (".parquet", ".jsonl")
_COLUMNS = 'columns "question" and "answer", or "prompt" and "reward_spec" (or "reward_model")'


class DatasetError(ValueError):
    """The data cannot be used; the message names file, row and fix."""


@dataclass(frozen=True)
class Question:
    """A whole question, and the number that answers it."""

    prompt: str
    answer: str


def load_questions(
    source: str, split: str, *, subset: str | None, count: int | None, instruction: str | None
) -> list[Question]:
    """Load the first `count` questions of a split; `instruction` None selects the source's default.
    Raises `DatasetError`."""
    if source == GENERATED:
        if split not in arithmetic.SPLITS:
            known = ", ".join(arithmetic.SPLITS)
            raise DatasetError(f"{GENERATED} has no split {split!r}: use one of {known}")
        rows: Iterable[Any] = arithmetic.make_rows(split, count or GENERATED_COUNT)
        return _read_questions(rows, GENERATED, instruction or "", count)
    path = Path(source)
    paths = [path] if path.suffix in SUFFIXES or path.exists() else []
    if not paths:
        try:
            paths = hub.fetch_split(source, split, subset)
        except hub.HubError as error:
            raise DatasetError(str(error)) from error
    suffix = INSTRUCTION if instruction is None else instruction
    return [
        question
        for path in paths
        for question in _read_questions(file_rows(path), str(path), suffix, count)
    ][:count]


def file_rows(path: Path) -> Iterator[Any]:
    """Read the rows of a file in order. Raises `DatasetError`."""
    if not path.is_file():
        raise DatasetError(f"{path} is no file; name a {' or '.join(SUFFIXES)} file")
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
    elif path.suffix == ".jsonl":
        yield from _json_rows(path)
    else:
        raise DatasetError(f"{path} is neither of {', '.join(SUFFIXES)}; convert it to one of them")


def _json_rows(path: Path) -> Iterator[Any]:
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(f"{path} is not UTF-8: {error}") from error
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                yield json.loads(line)
        except ValueError as error:
            raise DatasetError(f"{path}, line {number}: not JSON: {error}") from error


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DatasetError(f"{path} needs pyarrow to be read: {hub.INSTALL}") from error
    try:
        with ParquetFile(path) as file:
            for batch in file.iter_batches():
                yield from batch.to_pylist()
    except ArrowException as error:
        raise DatasetError(f"{path} cannot be read as parquet: {error}") from error


def _read_questions(
    rows: Iterable[Any], where: str, instruction: str, count: int | None
) -> list[Question]:
    result = [
        _parse_question(row, f"{where}, row {number}", instruction)
        for number, row in enumerate(islice(rows, count), 1)
    ]
    if not result:
        raise DatasetError(f"{where} has no rows")
    return result


def _parse_question(row: Any, where: str, instruction: str) -> Question:
    if not isinstance(row, dict):
        raise DatasetError(f"{where} is not an object with {_COLUMNS}")
    columns = cast("dict[str, Any]", row)
    if "question" in columns and "answer" in columns:
        question = _require_text(columns["question"], f"{where}: question")
        number = marked_number(_require_text(columns["answer"], f"{where}: answer"))
        if number is None:
            raise DatasetError(
                f'{where}: answer has no number after "#### "; it must end like "#### 72"'
            )
        return Question(" ".join([question, instruction]).strip(), _parse_number(number, where))
    rule = columns.get("reward_spec", columns.get("reward_model"))
    if "prompt" in columns and rule is not None:
        truth = cast("Mapping[str, Any]", rule).get("ground_truth") if _is_object(rule) else None
        if not isinstance(truth, str | int | float) or isinstance(truth, bool):
            raise DatasetError(f"{where}: reward_spec has no ground_truth, a number")
        return Question(_only_message(columns["prompt"], where), _parse_number(str(truth), where))
    raise DatasetError(
        f"{where} has the columns {', '.join(columns) or 'none'}; needed: {_COLUMNS}"
    )


def _only_message(prompt: Any, where: str) -> str:
    """Return the text of a prompt that is a text, or a list of one user message."""
    messages = cast("list[Any]", prompt) if isinstance(prompt, list) else [{"content": prompt}]
    if len(messages) != 1 or not _is_object(messages[0]):
        raise DatasetError(
            f"{where}: prompt must be a list of one user message; put the text of a system "
            "message into the question"
        )
    message = cast("Mapping[str, Any]", messages[0])
    if message.get("role", "user") != "user":
        raise DatasetError(f"{where}: the only message of prompt must have the role user")
    return _require_text(message.get("content"), f"{where}: prompt")


def _parse_number(text: str, where: str) -> str:
    number = text.replace(",", "").strip()
    if not re.fullmatch(NUMBER, number):
        raise DatasetError(f"{where}: the answer {text!r} is not a number such as 72 or -1.5")
    return number


def _require_text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DatasetError(f"{what} must be a non-empty text")
    return value


def _is_object(value: Any) -> bool:
    return isinstance(value, dict)
