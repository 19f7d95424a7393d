"""Values for arguments: things that the environment shows, and words of our own. Pure.

Whatever a server or a file says is data of somebody else. A value is taken over only if it consists
of characters that mean nothing to a prompt, a template or a terminal."""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

# No quotes, brackets, braces, bars, backslashes or line ends; no "..", and no option of a command.
_HARMLESS = re.compile(r"(?!.*\.\.)[^\W_][\w .,:/@+#&()-]{0,79}")
# Words of paths and names in a text.
_FILE_WORD = re.compile(r"(?<![\w./-])[\w-]+(?:/[\w.-]+)*(?:\.[A-Za-z]\w{0,7})(?![\w/-])")
_MOST_VALUES = 200

PATH, TEXT, NAME, ID = "path", "text", "name", "id"
_KINDS = (
    (PATH, {"path", "paths", "file", "files", "filename", "filepath", "dir", "directory"}),
    (PATH, {"folder", "source", "destination", "src", "dst"}),
    (TEXT, {"content", "contents", "text", "message", "body", "description", "note", "comment"}),
    (TEXT, {"summary", "observation", "observations", "thought", "details", "memo", "value"}),
    (ID, {"id", "ids", "uuid", "guid"}),
)
_ADJECTIVES = "amber brisk calm dusty eager faint gentle hollow ivory jolly keen lunar mellow"
_NOUNS = (
    "anchor apple basket bridge camera candle desert dragon elbow engine falcon feather garden"
    " guitar hammer harbor insect island jacket jungle kettle ladder mirror needle orchard pencil"
    " quarry ribbon saddle tunnel umbrella violin window yogurt zebra"
)
_VERBS = "bring carry check clean count fetch find fix keep lend move open paint pack sell"
ADJECTIVES, NOUNS, VERBS = _ADJECTIVES.split(), _NOUNS.split(), _VERBS.split()


def split_name(name: str) -> list[str]:
    """Return the words of an identifier in small letters: letters and digits, nothing else."""
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name)
    return [word.lower() for word in re.findall(r"[^\W_]+", spaced)]


def kind_of(name: str) -> str:
    """Return the kind of what a parameter of this name takes."""
    words = split_name(name)
    last = words[-1] if words else ""
    return next((kind for kind, names in _KINDS if last in names), NAME)


def is_harmless(value: str) -> bool:
    """Return True if a text may stand in a prompt, whoever wrote it."""
    return _HARMLESS.fullmatch(value) is not None


class ValuePool:
    """Things that are known to exist, by kind and by the name that they have."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.folders: list[str] = ["."]
        # Lines of the files that an episode begins with.
        self.lines: dict[str, list[str]] = {}
        self._values: defaultdict[str, list[Any]] = defaultdict(list)

    def add(self, name: str, value: Any) -> None:
        words = split_name(name)
        if not words or isinstance(value, bool) or not isinstance(value, str | int):
            return
        if isinstance(value, str) and not is_harmless(value):
            return
        known = self._values[_singular(words[-1])]
        if value not in known and len(known) < _MOST_VALUES:
            known.append(value)

    def add_path(self, path: str, *, is_folder: bool = False) -> None:
        known = self.folders if is_folder else self.paths
        if is_harmless(path) and path not in known and len(known) < _MOST_VALUES:
            known.append(path)

    def add_answer(self, arguments: Mapping[str, Any], text: str) -> None:
        """Learn from what a tool answered: the leaves of JSON by their names, and file names."""
        try:
            answer = json.loads(text)
        except (ValueError, RecursionError):
            within = next((v for k, v in arguments.items() if kind_of(k) == PATH), ".")
            for word in _FILE_WORD.findall(text[:5000]):
                self.add_path(word if within == "." else f"{within}/{word}")
            return
        for name, value in leaves_of(answer):
            self.add(name, value)

    def known(self, name: str) -> list[Any]:
        """Return the values that things of such a name have: those of `name` for `entityName`."""
        words = split_name(name)
        return list(self._values.get(_singular(words[-1]), [])) if words else []


def leaves_of(value: Any, name: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the texts and numbers within a JSON value, each with the name that it has."""
    if depth > 20:
        return
    if isinstance(value, dict):
        for key, each in cast("dict[str, Any]", value).items():
            yield from leaves_of(each, key, depth + 1)
    elif isinstance(value, list):
        for each in cast("list[Any]", value):
            yield from leaves_of(each, name, depth + 1)
    elif value is not None:
        yield name, value


def make_name(rng: random.Random) -> str:
    return rng.choice(NOUNS)


def make_sentence(rng: random.Random) -> str:
    return f"{rng.choice(VERBS)} the {rng.choice(ADJECTIVES)} {rng.choice(NOUNS)}"


def make_path(rng: random.Random, folders: Iterable[str], *, is_folder: bool) -> str:
    folder = rng.choice(list(folders))
    name = make_name(rng) if is_folder else f"{make_name(rng)}.txt"
    return name if folder == "." else f"{folder}/{name}"


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") else word
