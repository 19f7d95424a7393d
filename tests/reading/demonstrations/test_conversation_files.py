"""Files and folders of conversations: every format, and errors that name file and row."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from flotilla_common.episodes.conversations import Conversation
from flotilla_reading.demonstrations.conversation_files import (
    ConversationFileError,
    FileConversations,
)

CALL = {"id": "a", "type": "function", "function": {"name": "find", "arguments": '{"x": 1}'}}
TOOLS = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object"}}}]


def row(number: int, **also: Any) -> dict[str, Any]:
    said = [
        {"role": "user", "content": f"Find {number}."},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "a", "content": "7"},
        {"role": "assistant", "content": "It is 7."},
    ]
    return {"messages": said, "tools": json.dumps(TOOLS), **also}


def write_lines(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{json.dumps(each)}\n" for each in rows))
    return path


def write_parquet(path: Path, *rows: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return path


def write_arrow(path: Path, *rows: Any) -> Path:
    """Write a file as `datasets` saves it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.Table.from_pylist(list(rows))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return path


def write_json(path: Path, *rows: Any) -> Path:
    path.write_text(json.dumps(rows))
    return path


def read(path: Path, min_reward: float = 1.0, **options: Any) -> list[Conversation | None]:
    found = FileConversations(path, min_reward, **options)
    rows = list(found.read())
    assert found.total == len(rows)
    return rows


def said_in(rows: list[Conversation | None]) -> list[Any]:
    """What rows say, wherever they stand."""
    return [each and (each.prompt, each.turns, each.tools, each.task_key) for each in rows]


@pytest.mark.parametrize(
    ("name", "write"),
    [
        ("a.jsonl", write_lines),
        ("a.json", write_json),
        ("a.parquet", write_parquet),
        ("a.arrow", write_arrow),
    ],
)
def test_every_format_has_the_same_conversations(tmp_path: Path, name: str, write: Any) -> None:
    rows = [row(number) for number in range(600)]
    found = read(write(tmp_path / name, *rows))
    assert said_in(found) == said_in(read(write_lines(tmp_path / "same.jsonl", *rows)))
    first = found[0]
    assert first and first.source == name and first.prompt == "Find 0."
    assert len({each.key for each in found if each}) == 600


def test_a_table_has_the_keys_of_all_arguments_in_each_which_are_not_there(tmp_path: Path) -> None:
    rows = [row(0), row(1)]
    for each, arguments in zip(rows, ({"x": 1}, {"y": 2}), strict=True):
        function = {"name": "find", "arguments": arguments}
        each["messages"][1]["tool_calls"] = [{**CALL, "function": function}]
    found = read(write_parquet(tmp_path / "a.parquet", *rows))
    calls = [each.turns[0].calls[0].arguments for each in found if each]
    assert calls == ['{"x": 1}', '{"y": 2}']


def test_of_a_folder_with_splits_the_training_split_is_read(tmp_path: Path) -> None:
    write_parquet(tmp_path / "data/train-00000-of-00002.parquet", row(0))
    write_parquet(tmp_path / "data/train-00001-of-00002.parquet", row(1))
    write_parquet(tmp_path / "data/test-00000-of-00001.parquet", row(2))
    write_lines(tmp_path / ".cache/train.jsonl", row(3))
    write_json(tmp_path / "dataset_info.json", {})
    found = [each for each in read(tmp_path) if each]
    assert [each.prompt for each in found] == ["Find 0.", "Find 1."]
    assert found[1].key == ("data/train-00001-of-00002.parquet: row 1", 0, 0)


def test_of_a_saved_dataset_the_arrow_files_of_its_training_split_are_read(tmp_path: Path) -> None:
    write_arrow(tmp_path / "train/data-00000-of-00001.arrow", row(0))
    write_arrow(tmp_path / "test/data-00000-of-00001.arrow", row(1))
    for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json"):
        write_json(tmp_path / name, {})
    assert [each.prompt for each in read(tmp_path) if each] == ["Find 0."]


def test_of_a_collection_the_demonstrations_are_read(tmp_path: Path) -> None:
    write_lines(tmp_path / "demonstrations.jsonl", row(0, key="booking-1", reward=1.0))
    write_lines(tmp_path / "tasks.jsonl", {"key": "booking-1", "prompt": "x"})
    [found] = read(tmp_path)
    assert found and (found.task_key, found.reward) == ("booking-1", 1.0)


def test_rows_are_accepted_by_their_reward_and_what_became_of_all_is_counted(
    tmp_path: Path,
) -> None:
    silent = {"messages": [{"role": "assistant", "content": "Hm."}]}
    rows = [row(0, reward=0.4), row(1, reward=None), row(2), row(3, reward=0.5), silent]
    found = FileConversations(write_lines(tmp_path / "a.jsonl", *rows), 0.5)
    prompts = [each and each.prompt for each in found.read()]
    assert prompts == [None, None, "Find 2.", "Find 3.", None]
    end = found.end()
    assert end.counts == {
        **{"episodes": 5, "accepted": 3},
        **{"below_min_reward": 1, "ungraded": 1, "not_playable": 1},
    }
    assert end.left_out == ("line 5: no message of a user comes first",)
    assert end.selection == {"min_reward": 0.5, "ignored": []}


def test_an_error_names_file_and_row(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", row(0), row(1, source="web"))
    with pytest.raises(ConversationFileError, match=r"a.jsonl: line 2: unknown keys 'source'"):
        read(path)
    assert len(read(path, ignored={"source"})) == 2
    path.write_text('{"messages": \n')
    with pytest.raises(ConversationFileError, match=r"a.jsonl: line 1: .*truncated"):
        read(path)
    table = write_parquet(tmp_path / "a.parquet", row(0, source="web"))
    with pytest.raises(ConversationFileError, match=r"a.parquet: row 1: unknown keys 'source'"):
        read(table)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.csv", "x", "is none of .arrow, .json, .jsonl, .ndjson, .parquet, by its name"),
        ("a.parquet", "x", "a.parquet: .*Parquet"),
        ("a.arrow", "xxxxxxxxxxxxxxxx", "a.arrow: "),
        ("a.json", "{}", "a.json: expected an array"),
    ],
)
def test_a_file_of_another_kind_is_named(
    tmp_path: Path, name: str, content: str, reason: str
) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ConversationFileError, match=reason):
        read(tmp_path / name)


def test_a_folder_without_conversations_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConversationFileError, match="has no file of"):
        read(tmp_path)
