"""Search of a world's database for the phrase of a failed judge, as a verifier of our own.

Code inside a world, such as SQL, can build text that the gateway never passes."""

from dataclasses import replace

from flotilla_env_gateway.grading.passed_text import PHRASE
from flotilla_env_gateway.ports import Verification

SEARCH = "search_world"
_SOURCE = f'''
def {SEARCH}(env):
    """Return 1 if a row of the current database contains the phrase."""
    world = env.db("current")
    named = world.query("SELECT name FROM sqlite_master WHERE type IN ('table', 'view')")
    for (name,) in named.rows or ():
        table = '"' + name.replace('"', '""') + '"'
        columns = world.query(f"SELECT * FROM {{table}} LIMIT 1").columns or ()
        held = " OR ".join('"' + c.replace('"', '""') + '"' + " LIKE '%judge%'" for c in columns)
        rows = world.query(f"SELECT * FROM {{table}} WHERE {{held}}").rows if held else ()
        for row in rows or ():
            if re.search({PHRASE!r}, " ".join(map(str, row)), re.IGNORECASE):
                return 1
    return 0
'''


def search_of_world(verification: Verification) -> Verification:
    """Return the search to run in place of a verifier. Its result is 1 if the phrase is there."""
    return replace(
        verification,
        source=_SOURCE,
        function=SEARCH,
        arguments={},
        call=None,
        trusted=True,
        packages=False,
    )
