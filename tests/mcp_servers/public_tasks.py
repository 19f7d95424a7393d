"""Tasks for public MCP servers, two for each, with a right and a wrong way to play them.

A plain MCP server shows no database, so verifiers look through its read-only tools."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Call = tuple[str, Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Play:
    """What a policy does in an episode: its calls, and its final answer."""

    calls: Sequence[Call] = ()
    answer: str = ""


@dataclass(frozen=True, slots=True)
class PublicTask:
    """A task with a play that earns 1 and one that earns 0, as an untouched episode does.
    `verifier` is the body of a function of `env` and `final_answer`."""

    prompt: str
    verifier: str
    right: Play
    wrong: Play


def _one_call(name: str, **arguments: Any) -> Play:
    return Play([(name, arguments)])


EVERYTHING = (
    PublicTask(
        prompt="Add 19 and 23.",
        verifier="""
    text = env.call_tool("get-sum", a=19, b=23)
    return int(bool(final_answer) and text.endswith(f" is {final_answer}."))
""",
        right=Play([("get-sum", {"a": 19, "b": 23})], "42"),
        wrong=Play([("get-sum", {"a": 19, "b": 24})], "43"),
    ),
    PublicTask(
        prompt="What is the temperature in Chicago?",
        verifier="""
    weather = env.call_tool("get-structured-content", location="Chicago")
    return int(final_answer == str(weather["temperature"]))
""",
        right=Play([("get-structured-content", {"location": "Chicago"})], "36"),
        wrong=Play([("get-structured-content", {"location": "New York"})], "33"),
    ),
)

FILESYSTEM = (
    PublicTask(
        prompt="Write eggs into list.txt.",
        verifier="""
    if "[FILE] list.txt" not in env.call_tool("list_directory", path="."):
        return 0
    return int(env.call_tool("read_text_file", path="list.txt").splitlines()[0] == "eggs")
""",
        right=_one_call("write_file", path="list.txt", content="eggs"),
        wrong=_one_call("write_file", path="list.txt", content="ham"),
    ),
    PublicTask(
        prompt="Move Ann's message from the inbox to what is done.",
        verifier="""
    done = env.call_tool("list_directory", path="done")
    left = env.call_tool("list_directory", path="inbox")
    return int("ann.txt" in done and "ben.txt" in done and ".txt" not in left)
""",
        right=_one_call("move_file", source="inbox/ann.txt", destination="done/ann.txt"),
        wrong=_one_call("move_file", source="inbox/ann.txt", destination="inbox/cem.txt"),
    ),
)


def _remember(name: str) -> Play:
    person = {"name": name, "entityType": "person", "observations": []}
    return _one_call("create_entities", entities=[person])


def _relate(one: str, other: str) -> Play:
    relation = {"from": one, "to": other, "relationType": "knows"}
    return _one_call("create_relations", relations=[relation])


MEMORY = (
    PublicTask(
        prompt="Remember Ann.",
        verifier="""
    people = [entity["name"] for entity in env.call_tool("read_graph")["entities"]]
    return int(sorted(people) == ["Ann", "Cem", "Dana"])
""",
        right=_remember("Ann"),
        wrong=_remember("Ben"),
    ),
    PublicTask(
        prompt="Remember that Cem knows Dana.",
        verifier="""
    relations = env.call_tool("read_graph")["relations"]
    return int([(r["from"], r["to"]) for r in relations] == [("Cem", "Dana")])
""",
        right=_relate("Cem", "Dana"),
        wrong=_relate("Dana", "Cem"),
    ),
)


def _think(count: int, **last: Any) -> Play:
    """Return a play of that many thoughts, the last one with more arguments."""
    thoughts: list[dict[str, Any]] = [
        {"thought": f"{n}", "thoughtNumber": n, "totalThoughts": 3, "nextThoughtNeeded": True}
        for n in range(1, count + 1)
    ]
    thoughts[-1].update(last)
    return Play([("sequentialthinking", thought) for thought in thoughts])


# The server shows its state only with the answer to a thought, so the verifier adds one.
_LAST_THOUGHT = """
    last = env.call_tool("sequentialthinking",
        thought="graded", thoughtNumber=3, totalThoughts=3, nextThoughtNeeded=False)
"""

SEQUENTIAL_THINKING = (
    PublicTask(
        prompt="Think three times.",
        verifier=_LAST_THOUGHT + "    return int(last['thoughtHistoryLength'] == 4)\n",
        right=_think(3),
        wrong=_think(2),
    ),
    PublicTask(
        prompt="Think once, and branch from that.",
        verifier=_LAST_THOUGHT + "    return int(last['branches'] == ['b'])\n",
        right=_think(2, branchFromThought=1, branchId="b"),
        wrong=_think(2, branchFromThought=1, branchId="c"),
    ),
)


def _convert_time(target: str, answer: str) -> Play:
    arguments = {
        "source_timezone": "Asia/Tokyo",
        "time": "09:00",
        "target_timezone": f"Asia/{target}",
    }
    return Play([("convert_time", arguments)], answer)


_CONVERTED = """
    converted = env.call_tool("convert_time",
        source_timezone="Asia/Tokyo", time="09:00", target_timezone="Asia/{}")
"""

TIME = (
    PublicTask(
        prompt="It is 9:00 in Tokyo. What time is it in Kolkata?",
        verifier=_CONVERTED.format("Kolkata")
        + "    return int(converted['target']['datetime'][11:16] == final_answer)\n",
        right=_convert_time("Kolkata", "05:30"),
        wrong=_convert_time("Dubai", "04:00"),
    ),
    PublicTask(
        prompt="By how many hours is Dubai ahead of Tokyo?",
        verifier=_CONVERTED.format("Dubai")
        + "    return int(converted['time_difference'] == f'{final_answer}h')\n",
        right=_convert_time("Dubai", "-5.0"),
        wrong=_convert_time("Kolkata", "-3.5"),
    ),
)


def _commit(message: str) -> Play:
    return Play(
        [
            ("git_add", {"repo_path": ".", "files": ["note.txt"]}),
            ("git_commit", {"repo_path": ".", "message": message}),
        ]
    )


GIT = (
    PublicTask(
        prompt="Commit note.txt, with the message: Add a note",
        verifier="""
    log = env.call_tool("git_log", repo_path=".", max_count=5)
    status = env.call_tool("git_status", repo_path=".")
    messages = [line for line in log.splitlines() if line.startswith("Message: ")]
    committed = messages == ["Message: Add a note", "Message: Begin"]
    return int(committed and "note.txt" not in status)
""",
        right=_commit("Add a note"),
        wrong=_commit("Add two notes"),
    ),
    PublicTask(
        prompt="Create the branch feature.",
        verifier="""
    branches = env.call_tool("git_branch", repo_path=".", branch_type="local")
    return int(branches.replace("*", " ").split() == ["feature", "main"])
""",
        right=_one_call("git_create_branch", repo_path=".", branch_name="feature"),
        wrong=_one_call("git_create_branch", repo_path=".", branch_name="future"),
    ),
)

SQLITE = (
    PublicTask(
        prompt="Add a potato, for 3, to the items.",
        verifier="""
    rows = env.call_tool("read_query", query="SELECT name, price FROM items ORDER BY name")
    return int(rows == str([{"name": "carrot", "price": 2}, {"name": "potato", "price": 3}]))
""",
        right=_one_call("write_query", query="INSERT INTO items VALUES ('potato', 3)"),
        wrong=_one_call("write_query", query="INSERT INTO items VALUES ('potato', 4)"),
    ),
    PublicTask(
        prompt="Create a table of orders, by item.",
        verifier="""
    tables = env.call_tool("list_tables")
    columns = env.call_tool("describe_table", table_name="orders")
    return int("'orders'" in tables and "'item'" in columns)
""",
        right=_one_call("create_table", query="CREATE TABLE orders (item TEXT)"),
        wrong=_one_call("create_table", query="CREATE TABLE orders (thing TEXT)"),
    ),
)


def _calculate(expression: str, answer: str) -> Play:
    return Play([("calculate", {"expression": expression})], answer)


CALCULATOR = (
    PublicTask(
        prompt="What is six times seven?",
        verifier="""
    return int(str(env.call_tool("calculate", expression="6 * 7")) == final_answer)
""",
        right=_calculate("6 * 7", "42"),
        wrong=_calculate("6 + 7", "13"),
    ),
    PublicTask(
        prompt="What is two to the tenth power?",
        verifier="""
    return int(str(env.call_tool("calculate", expression="2 ** 10")) == final_answer)
""",
        right=_calculate("2 ** 10", "1024"),
        wrong=_calculate("2 * 10", "20"),
    ),
)
