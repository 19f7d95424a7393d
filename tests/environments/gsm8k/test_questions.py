"""Single-turn questions: their source, and the check of an answer."""

import json
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from flotilla_environments.api import open_instance
from flotilla_environments.gsm8k.__main__ import main
from flotilla_environments.gsm8k.arithmetic import SPLITS, make_problem
from flotilla_environments.gsm8k.dataset import INSTRUCTION
from flotilla_environments.gsm8k.hub import HubError, choose_files
from flotilla_environments.gsm8k.verifiers.flexible import last_number
from flotilla_environments.gsm8k.verifiers.strict import marked_number
from flotilla_environments.tasks import load_tasks
from tests.support.examples import examples
from tests.support.http_answers import Answer, serve_answers
from tests.support.repository import ROOT

ROWS = [
    {"question": "What is 1 + 1?", "answer": "1 + 1 = 2\n#### 2"},
    {"question": "What is 500 + 700?", "answer": "500 + 700 = 1,200\n#### 1,200"},
]
PREPARED = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "What is 1 + 1?"}],
        "env_class": "gsm8k",
        column: {"method": "rule", "ground_truth": "2"},
        "extra_info": {"index": 0},
    }
    for column in ("reward_spec", "reward_model")
]


@pytest.mark.parametrize(
    ("text", "strict", "flexible"),
    [
        ("so it is\n#### 72", "72", "72"),
        ("#### 1,200 apples", "1200", "1,200"),
        ("#### -3", "-3", "-3"),
        ("#### 1 and then #### 2", "1", "2"),
        ("#### 72.", "72.", "72."),
        ("####72", None, "72"),
        ("#### $72", None, "72"),
        ("The answer is 72 .", None, "72"),
        ("seventy-two", None, None),
        ("", None, None),
    ],
)
def test_the_rules_read_the_number_to_the_letter(
    text: str, strict: str | None, flexible: str | None
) -> None:
    assert marked_number(text) == strict
    assert last_number(text) == flexible


@given(st.text(), st.integers())
@settings(max_examples=examples(200))
def test_a_marked_number_is_found_behind_any_text_without_marks(before: str, number: int) -> None:
    assert marked_number(f"{before.replace('#', '')}\n#### {number}") == str(number)


@pytest.mark.parametrize("split", SPLITS)
def test_generated_problems_are_solved_by_their_own_working(split: Any) -> None:
    for index in range(200):
        drawn = make_problem(split, index)
        assert drawn == make_problem(split, index)
        numbers = [int(word.strip(".")) for word in drawn.question.split() if word[0].isdigit()]
        assert numbers == [drawn.steps[0].left, *(step.right for step in drawn.steps)]
        assert marked_number(drawn.solution) == str(drawn.answer)
        assert drawn.answer not in {step.left for step in drawn.steps}
        assert last_number(drawn.question) != str(drawn.answer)


def test_held_out_sums_are_in_no_other_split() -> None:
    seen = {make_problem(split, i).steps for split in ("train", "demo") for i in range(2_000)}
    assert seen.isdisjoint(make_problem("test", i).steps for i in range(300))


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    if path.suffix == ".parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize("name", ["q.parquet", "q.jsonl"])
def test_questions_of_a_file_become_tasks(name: str, tmp_path: Path) -> None:
    source, out = write(tmp_path / name, ROWS), tmp_path / "made" / "tasks.json"
    assert main(["--from", str(source), "--split", "train", "--out", str(out)]) == 0
    first, second = load_tasks(out)
    assert first["prompt"] == f"What is 1 + 1? {INSTRUCTION}"
    assert first["task_modality"] == "single_turn"
    assert (first["key"], first["env_id"]) == ("gsm8k-train-000000", "gsm8k")
    assert [task["data_id"] for task in (first, second)] == ["train-000000=2", "train-000001=1200"]
    assert "1200" not in json.dumps({**second, "data_id": ""}), "only the data id has the answer"


@pytest.mark.parametrize("name", ["q.parquet", "q.jsonl"])
@pytest.mark.parametrize("row", PREPARED, ids=["reward_spec", "reward_model"])
def test_prompts_that_are_whole_stay_as_they_are(
    name: str, row: dict[str, Any], tmp_path: Path
) -> None:
    source, out = write(tmp_path / name, [row]), tmp_path / "tasks.json"
    assert main(["--from", str(source), "--rule", "flexible", "--out", str(out)]) == 0
    [task] = load_tasks(out)
    assert (task["prompt"], task["data_id"]) == ("What is 1 + 1?", "train-000000=2")
    assert "last_number" in task["verifier_func"]


def test_count_and_instruction_are_the_users(tmp_path: Path) -> None:
    source, out = write(tmp_path / "q.jsonl", ROWS), tmp_path / "tasks.json"
    wanted = ["--count", "1", "--instruction", "Be brief."]
    assert main(["--from", str(source), *wanted, "--out", str(out)]) == 0
    assert [task["prompt"] for task in load_tasks(out)] == ["What is 1 + 1? Be brief."]


BAD_LINES = {
    '{"question": "Q", "answer": "72"}': 'row 1: answer has no number after "#### "',
    '{"question": "Q", "answer": "#### ."}': "row 1: the answer '.' is not a number",
    '{"question": "", "answer": "#### 1"}': "row 1: question must be a non-empty text",
    '{"question": "Q"}': 'row 1 has the columns question; needed: columns "question" and "answer"',
    "[1]": "row 1 is not an object",
    '{"question": "Q", "answer": "#### 1"}\n{': "line 2: not JSON",
    "": "has no rows",
    '{"prompt": [], "reward_spec": {"ground_truth": "1"}}': "prompt must be a list of one user",
    '{"prompt": [{"role": "system", "content": "x"}], "reward_spec": {"ground_truth": "1"}}': (
        "the only message of prompt must have the role user"
    ),
    '{"prompt": "Q", "reward_spec": {}}': "reward_spec has no ground_truth",
    '{"prompt": "Q", "reward_model": {"ground_truth": "many"}}': "'many' is not a number",
}


@pytest.mark.parametrize(("lines", "message"), BAD_LINES.items(), ids=BAD_LINES.values())
def test_a_bad_file_is_refused_with_its_row(
    lines: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "q.jsonl"
    source.write_text(lines)
    assert main(["--from", str(source), "--out", str(tmp_path / "tasks.json")]) == 2
    output = capsys.readouterr().err
    assert message in output and str(source) in output
    assert not (tmp_path / "tasks.json").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("q.parquet", b"PAR1 not", "cannot be read as parquet"),
        ("q.jsonl", b"\xff\xfe", "is not UTF-8"),
        ("q.csv", b"question,answer", "is neither of .parquet, .jsonl"),
        ("gone.jsonl", None, "is no file"),
    ],
)
def test_what_is_no_data_file_is_refused(
    name: str,
    content: bytes | None,
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert main(["--from", str(tmp_path / name), "--out", str(tmp_path / "t.json")]) == 2
    assert message in capsys.readouterr().err


def test_a_split_that_is_not_generated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    requests = ["--from", "arithmetic", "--split", "validation", "--out", str(tmp_path / "t.json")]
    assert main(requests) == 2
    assert "use one of train, test, demo" in capsys.readouterr().err


HUB_FILES = ["README.md", "main/train-00000-of-00001.parquet", "main/test-00000-of-00001.parquet"]


def test_the_files_of_a_split_are_found_by_name() -> None:
    assert choose_files(HUB_FILES, "d", "train", None) == ["main/train-00000-of-00001.parquet"]
    assert choose_files(["b/train_2.jsonl", "b/train_1.jsonl"], "d", "train", "b") == [
        "b/train_1.jsonl",
        "b/train_2.jsonl",
    ]
    with pytest.raises(HubError, match=r"has no file trai\*.parquet"):
        choose_files(HUB_FILES, "d", "trai", None)
    with pytest.raises(HubError, match="in main, socratic; choose one with --subset"):
        choose_files([*HUB_FILES, "socratic/train.parquet"], "d", "train", None)


@contextmanager
def hub(files: dict[str, bytes]) -> Generator[str]:
    """A server with as much of the hub's protocol as fetching a data set needs."""

    def answer(request: BaseHTTPRequestHandler) -> Answer:
        name = request.path.partition("/resolve/main/")[2]
        if request.path.startswith("/api/datasets/"):
            siblings = [{"rfilename": file} for file in files]
            body = json.dumps({"id": "some/set", "siblings": siblings}).encode()
        else:
            body = files.get(name, b"")
        headers = {"etag": f'"{abs(hash(name))}"', "x-repo-commit": "0" * 40}
        return 200 if body else 404, headers, body

    with serve_answers(answer) as endpoint:
        yield endpoint


def fetch(endpoint: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The command with another hub, which its client reads once per process."""
    command = (
        sys.executable,
        "-m",
        "flotilla_environments.gsm8k",
        "--from",
        "some/set",
        *arguments,
    )
    return subprocess.run(
        [*command, "--out", str(folder / "tasks.json")],
        env={"PATH": "", "HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "cache")},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60.0,
    )


def test_a_data_set_of_the_hub_is_fetched(tmp_path: Path) -> None:
    content = write(tmp_path / "q.parquet", ROWS).read_bytes()
    with hub({"main/train-00000-of-00001.parquet": content, "README.md": b"#"}) as endpoint:
        done = fetch(endpoint, tmp_path)
        assert done.returncode == 0, done.stderr
        assert len(load_tasks(tmp_path / "tasks.json")) == 2
        refused = fetch(endpoint, tmp_path, "--split", "test")
    assert (refused.returncode, "Traceback" in refused.stderr) == (2, False)
    assert "data set 'some/set' has no file test*.parquet" in refused.stderr
    gone = fetch(endpoint, tmp_path)
    assert (gone.returncode, "Traceback" in gone.stderr) == (2, False)
    assert "data set 'some/set' could not be fetched" in gone.stderr


def test_an_instance_knows_the_answer_and_offers_no_tool() -> None:
    instance = open_instance("gsm8k", "train-000000=1200")
    assert instance.tools() == []
    facts = dict(instance.query("seed", "select name, value from task_facts").rows)
    assert facts == {"kind": "question", "answer": "1200"}
    with pytest.raises(ValueError, match="use SPLIT-NUMBER=ANSWER"):
        open_instance("gsm8k", "train-000000")
