"""Prompts say what calls do, in words and quoted values."""

import pytest

from flotilla_reading.own_tools.wording import write_prompt
from flotilla_reading.play.solutions import SolutionCall


@pytest.mark.parametrize(
    ("name", "arguments", "prompt"),
    [
        (
            "write_file",
            {"path": "a.txt", "content": "no milk"},
            'Write "no milk" into the file a.txt.',
        ),
        ("create_directory", {"path": "done"}, "Create the folder done."),
        ("moveFile", {"source": "a", "destination": "b"}, "Move a to b."),
        ("delete_file", {"path": "a.txt"}, "Delete a.txt."),
        ("book_room", {"hotel": "Ox", "nights": 2}, 'Book a room with hotel "Ox" and nights 2.'),
        ("git_create_branch", {"branch_name": "new"}, 'Create a branch: "new".'),
        (
            "delete_entities",
            {"entityNames": ["Ann", "Ben"]},
            'Delete entities with entity names "Ann" and "Ben".',
        ),
        ("create_entities", {"entities": [{"name": "Ann"}]}, 'Create entities: (name "Ann").'),
        (
            "write_query",
            {"query": "DELETE FROM items WHERE name = 'egg'"},
            "Delete from items what has name 'egg'.",
        ),
        ("reset", {}, "Reset."),
    ],
)
def test_a_call_is_described_by_its_name_and_values(
    name: str, arguments: dict[str, object], prompt: str
) -> None:
    assert write_prompt([SolutionCall(name, arguments)], "git") == prompt


def test_calls_are_told_in_their_order() -> None:
    calls = [SolutionCall("delete_file", {"path": path}) for path in ("a", "b")]
    assert write_prompt(calls) == "Delete a. Then delete b."
