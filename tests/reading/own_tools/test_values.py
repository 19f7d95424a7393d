"""Values of others are taken over only if they mean nothing to a prompt."""

import pytest

from flotilla_reading.own_tools.values import ValuePool, is_harmless, kind_of, split_name


@pytest.mark.parametrize("text", ["inbox/ann.txt", "Asia/Tokyo", "two words", "Zoë", "a-1"])
def test_words_paths_and_names_are_harmless(text: str) -> None:
    assert is_harmless(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "../up",
        "/etc/passwd",
        "a\nb",
        "<tool_call>",
        "{{ x }}",
        "a|b",
        "x" * 81,
        "a\u202eb",
        "--rm",
        'a"b',
        "a`b",
        "a\\b",
        "a\x1b[0m",
        "a/../b",
        "{% if %}",
        "<|im_end|>",
        "$HOME",
    ],
)
def test_what_a_prompt_or_a_terminal_would_read_otherwise_is_not(text: str) -> None:
    assert not is_harmless(text)
    pool = ValuePool()
    pool.add("name", text)
    pool.add_path(text)
    assert (pool.known("name"), pool.paths) == ([], [])


def test_a_name_has_the_kind_and_the_values_of_its_last_word() -> None:
    pool = ValuePool()
    pool.add_answer({}, '{"people": [{"name": "Ann", "age": 3}]}')
    assert pool.known("entityNames") == ["Ann"]
    assert split_name("entityNames") == ["entity", "names"]
    assert [kind_of(n) for n in ("filePath", "newText", "user_id", "colour")] == [
        *("path", "text", "id", "name")
    ]


def test_files_that_a_tool_lists_are_those_of_the_folder_it_was_asked_for() -> None:
    pool = ValuePool()
    pool.add_answer({"path": "inbox"}, "[FILE] ann.txt\n[DIR] old")
    assert pool.paths == ["inbox/ann.txt"]
