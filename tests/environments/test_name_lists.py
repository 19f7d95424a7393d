"""Lists of words, and the part of each that is never trained on."""

from flotilla_environments.name_lists import LISTS, split_pool


def test_no_word_is_in_two_lists() -> None:
    words = [word for words in LISTS.values() for word in words]
    assert len(words) == len(set(words))


def test_fifteen_percent_of_each_list_is_novel() -> None:
    for words in LISTS.values():
        train, novel = split_pool(words)
        assert train + novel == words
        assert len(set(words)) == len(words)
        assert 0.1 < len(novel) / len(words) <= 0.15
