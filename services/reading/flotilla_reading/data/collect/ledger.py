"""The ledger of a collection: tries, requests and replays, each on disk before it is begun, and
again when it ends. Rows are added and ended, never removed; a process that is killed loses nothing
of what it has paid for."""

import json
import sqlite3
import uuid
from collections import Counter, defaultdict
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flotilla_reading.data.collect.budget import Spending
from flotilla_reading.data.collect.fates import Outcome, Replay
from flotilla_reading.data.collect.recorded_episodes import RecordedEpisode, digest_of
from flotilla_reading.data.entries import DataError

FORMAT = "1"
LEDGER = "ledger.sqlite"
_SCHEMA = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
-- A teacher's try has a place from 1; a recorded one the name of its episode.
CREATE TABLE tries (
  id INTEGER PRIMARY KEY, task TEXT NOT NULL, key TEXT NOT NULL, place INTEGER NOT NULL,
  episode TEXT UNIQUE, ended INTEGER NOT NULL DEFAULT 0, reward REAL,
  no_grade TEXT NOT NULL DEFAULT '', stopped TEXT NOT NULL DEFAULT '', messages TEXT,
  tools TEXT REFERENCES tools
) STRICT;
-- The request of a turn that was answered has the answer.
CREATE TABLE requests (
  id INTEGER PRIMARY KEY, try INTEGER NOT NULL REFERENCES tries, turn INTEGER NOT NULL,
  asked TEXT NOT NULL, answer TEXT, prompt INTEGER, completion INTEGER
) STRICT;
CREATE INDEX requests_of_try ON requests (try);
CREATE TABLE replays (
  id INTEGER PRIMARY KEY, try INTEGER NOT NULL REFERENCES tries,
  ended INTEGER NOT NULL DEFAULT 0, reward REAL, no_grade TEXT NOT NULL DEFAULT '',
  tools TEXT REFERENCES tools
) STRICT;
CREATE TABLE tools (digest TEXT PRIMARY KEY, json TEXT NOT NULL) STRICT;
"""


@dataclass(slots=True)
class Try:
    """A try at the task with the digest `task`. `place` is its number among the teacher's, or 0 for
    a recorded episode."""

    id: int
    task: str
    key: str
    place: int
    ended: bool = False
    reward: float | None = None
    no_grade: str = ""
    stopped: str = ""
    replay: Replay | None = None

    @property
    def outcome(self) -> Outcome:
        return Outcome(self.reward, self.no_grade, self.replay)


@dataclass(frozen=True, slots=True)
class KnownTurn:
    """A turn that was paid for: the digest of what was asked, and the answer as JSON."""

    asked: str
    answer: Any


@dataclass(frozen=True, slots=True)
class Conversation:
    """The messages of an ended try, and the tools that were offered, if they are known."""

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None


class Ledger:
    """An open ledger. Every method that writes is on disk when it returns."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db
        (self.collection_id,) = _read_row(db, "SELECT value FROM meta WHERE name = 'id'")
        self.spent = _read_spending(db)
        self._tries: defaultdict[str, list[Try]] = defaultdict(list)
        for one in _read_tries(db):
            self._tries[one.task].append(one)

    def tries_of(self, task: str) -> Sequence[Try]:
        """Return all tries at a task, by its digest, in the order of their beginnings."""
        return self._tries[task]

    @property
    def has_tries(self) -> bool:
        return any(self._tries.values())

    def settle(self, facts: Mapping[str, str]) -> None:
        """Write what must not change between the runs of a collection, named as the user knows it.
        Raises DataError if it did."""
        for name, value in facts.items():
            self._db.execute("INSERT OR IGNORE INTO meta VALUES (?, ?)", (name, value))
            sql = "SELECT value FROM meta WHERE name = ?"
            (known,) = self._db.execute(sql, (name,)).fetchone()
            if known != value:
                raise DataError(
                    f"this collection began with {name} {known}, not {value}: tries of both would"
                    " be counted together; choose another --out"
                )

    def add_episodes(self, episodes: Iterable[RecordedEpisode], tasks: Mapping[str, str]) -> int:
        """Add recorded episodes as ended tries at the task of their key, by its digest, unless they
        are known; return how many are of no task. Equal ones of one source count each."""
        others, seen = 0, Counter[str]()
        self._db.execute("BEGIN")
        for each in episodes:
            task = tasks.get(each.key)
            others += task is None
            if task is not None:
                name = f"{task}:{each.digest}"
                seen[name] += 1
                self._add_episode(each, task, f"{name}:{seen[name]}")
        self._db.execute("COMMIT")
        return others

    def begin_try(self, task: str, key: str, place: int) -> Try:
        sql = "INSERT INTO tries (task, key, place) VALUES (?, ?, ?)"
        begun = Try(self._insert(sql, task, key, place), task, key, place)
        self._tries[task].append(begun)
        return begun

    def end_try(
        self,
        one: Try,
        outcome: Outcome,
        stopped: str,
        conversation: Conversation,
    ) -> None:
        tools = self._keep_tools(conversation.tools)
        sql = (
            "UPDATE tries SET ended = 1, reward = ?, no_grade = ?, stopped = ?, messages = ?,"
            " tools = ? WHERE id = ?"
        )
        messages = json.dumps(conversation.messages)
        self._db.execute(sql, (outcome.reward, outcome.no_grade, stopped, messages, tools, one.id))
        one.ended, one.stopped = True, stopped
        one.reward, one.no_grade = outcome.reward, outcome.no_grade

    def begin_request(self, one: Try, turn: int, asked: str) -> int:
        """Write that a turn is asked for; return the request's id."""
        sql = "INSERT INTO requests (try, turn, asked) VALUES (?, ?, ?)"
        request = self._insert(sql, one.id, turn, asked)
        self.spent.calls += 1
        self.spent.unknown += 1
        return request

    def end_request(self, request: int, answer: Any, usage: tuple[int, int] | None) -> None:
        """Write the answer of a turn, with the tokens of prompt and answer."""
        prompt, completion = usage or (None, None)
        sql = "UPDATE requests SET answer = ?, prompt = ?, completion = ? WHERE id = ?"
        self._db.execute(sql, (json.dumps(answer), prompt, completion, request))
        if usage is not None:
            self.spent.unknown -= 1
            self.spent.prompt += usage[0]
            self.spent.completion += usage[1]

    def turns_of(self, one: Try) -> dict[int, KnownTurn]:
        """Return the turns of a try that were answered, by number."""
        sql = "SELECT turn, asked, answer FROM requests WHERE try = ? AND answer IS NOT NULL"
        return {
            turn: KnownTurn(asked, _read_json(answer))
            for turn, asked, answer in self._db.execute(sql, (one.id,))
        }

    def spending_of(self, one: Try) -> Spending:
        return _read_spending(self._db, one.id)

    def begin_replay(self, one: Try) -> int:
        """Write that a try is replayed; return the replay's id."""
        return self._insert("INSERT INTO replays (try) VALUES (?)", one.id)

    def end_replay(
        self, replay: int, one: Try, grade: Replay, tools: Sequence[Mapping[str, Any]] | None
    ) -> None:
        sql = "UPDATE replays SET ended = 1, reward = ?, no_grade = ?, tools = ? WHERE id = ?"
        kept = self._keep_tools(tools)
        self._db.execute(sql, (grade.reward, grade.no_grade, kept, replay))
        one.replay = grade

    def conversation_of(self, one: Try) -> Conversation:
        """Return the conversation of an ended try; its tools may be those of its replay."""
        sql = (
            "SELECT messages, coalesce((SELECT json FROM tools WHERE digest = t.tools), (SELECT"
            " json FROM replays r JOIN tools ON digest = r.tools WHERE r.try = t.id LIMIT 1))"
            " FROM tries t WHERE id = ?"
        )
        messages, tools = _read_row(self._db, sql, one.id)
        return Conversation(_read_json(messages), _read_json(tools) if tools else None)

    def _insert(self, sql: str, *values: Any) -> int:
        row = self._db.execute(sql, values).lastrowid
        assert row is not None
        return row

    def _add_episode(self, each: RecordedEpisode, task: str, name: str) -> None:
        sql = (
            "INSERT OR IGNORE INTO tries (task, key, place, episode, ended, reward, no_grade,"
            " messages, tools) VALUES (?, ?, 0, ?, 1, ?, ?, ?, ?)"
        )
        tools = self._keep_tools(each.tools)
        values = (task, each.key, name, each.reward, each.no_grade)
        added = self._db.execute(sql, (*values, json.dumps(each.messages), tools))
        if added.rowcount and added.lastrowid is not None:
            known = Try(added.lastrowid, task, each.key, 0, True, each.reward, each.no_grade)
            self._tries[task].append(known)

    def _keep_tools(self, tools: Sequence[Mapping[str, Any]] | None) -> str | None:
        if tools is None:
            return None
        text = json.dumps(tools)
        digest = digest_of(tools)
        self._db.execute("INSERT OR IGNORE INTO tools VALUES (?, ?)", (digest, text))
        return digest


def _read_row(db: sqlite3.Connection, sql: str, *values: Any) -> Sequence[Any]:
    row = db.execute(sql, values).fetchone()
    if row is None:
        raise _damaged("a row is missing")
    return row


def _read_json(text: str | None) -> Any:
    try:
        return json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise _damaged(f"a conversation or an answer cannot be read: {error}") from error


def _damaged(what: str) -> DataError:
    return DataError(f"{LEDGER} is damaged: {what}; restore it, or choose another --out")


@contextmanager
def open_ledger(folder: Path) -> Generator[Ledger]:
    """Open the ledger of a folder, or make one; no other process can, meanwhile. A new one is gone
    again if the work fails before its first try. Raises DataError."""
    is_new, ledger = not (folder / LEDGER).exists(), None
    try:
        with _open_exclusively(folder) as ledger:
            yield ledger
    except Exception:
        is_unused = is_new and ledger is not None and not ledger.has_tries
        if is_unused and [each.name for each in folder.iterdir()] == [LEDGER]:
            (folder / LEDGER).unlink()
            folder.rmdir()
        raise


@contextmanager
def _open_exclusively(folder: Path) -> Generator[Ledger]:
    path = folder / LEDGER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists() and (names := sorted(each.name for each in folder.iterdir())):
            raise DataError(f"{folder} holds something else ({names[0]}): choose another folder")
        with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as db:
            db.execute("PRAGMA locking_mode = EXCLUSIVE")
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = FULL")
            _prepare(db, path)
            yield Ledger(db)
    except OSError as error:
        raise DataError(f"{folder}: {error.strerror}") from error
    except sqlite3.DatabaseError as error:
        if getattr(error, "sqlite_errorname", "").startswith("SQLITE_BUSY"):
            raise DataError(f"another `flotilla data collect` works in {folder}") from error
        raise DataError(f"{path}: {error}") from error


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute("BEGIN IMMEDIATE")
    if not db.execute("SELECT 1 FROM sqlite_master WHERE name = 'meta'").fetchone():
        for statement in _SCHEMA.split(";\n"):
            db.execute(statement)
        facts = (("format", FORMAT), ("id", uuid.uuid4().hex))
        db.executemany("INSERT INTO meta VALUES (?, ?)", facts)
    found = db.execute("SELECT value FROM meta WHERE name = 'format'").fetchone()
    db.execute("COMMIT")
    if found != (FORMAT,):
        raise DataError(
            f"{path} has format {found and found[0]}, and this Flotilla reads {FORMAT}: continue"
            " with the one that began it, or choose another --out"
        )


def _read_spending(db: sqlite3.Connection, try_id: int | None = None) -> Spending:
    sql = (
        "SELECT count(*), coalesce(sum(prompt), 0), coalesce(sum(completion), 0),"
        " count(*) - count(prompt) FROM requests WHERE ?1 IS NULL OR try = ?1"
    )
    return Spending(*db.execute(sql, (try_id,)).fetchone())


def _read_tries(db: sqlite3.Connection) -> Iterable[Try]:
    # Of several replays, the last that has ended counts.
    sql = (
        "SELECT t.id, t.task, t.key, t.place, t.ended, t.reward, t.no_grade, t.stopped, r.ended,"
        " r.reward, r.no_grade FROM tries t LEFT JOIN replays r ON r.id = (SELECT max(id) FROM"
        " replays WHERE try = t.id AND ended = 1) ORDER BY t.id"
    )
    for row in db.execute(sql):
        one = Try(*row[:8])
        one.ended, one.replay = bool(one.ended), Replay(*row[9:]) if row[8] else None
        yield one
