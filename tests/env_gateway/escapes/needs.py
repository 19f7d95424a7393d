# pyright: basic
"""Programs that do what a verifier may need of Python. Each reports whether it worked."""

import asyncio
import ctypes
import datetime
import decimal
import difflib
import gzip
import hashlib
import importlib
import json
import lzma
import mmap
import os
import platform
import queue
import random
import re
import resource
import secrets
import select
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
import warnings
import zoneinfo

OTHER_SYSTEMS = {"_msi", "_overlapped", "_scproxy", "_winapi", "msilib", "msvcrt", "nt"}
# Depend on how Python was built, or show something.
OPTIONAL = {"_dbm", "_gdbm", "_tkinter", "antigravity", "idlelib", "this", "tkinter", "turtle"}


def every_module_of_the_standard_library(at):
    warnings.simplefilter("ignore")
    missing = []
    for name in sys.stdlib_module_names - OTHER_SYSTEMS - OPTIONAL - {"winreg", "winsound"}:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            # Debian leaves some out; a module must not fail for another reason.
            if error.name != name and error.name not in OPTIONAL:
                missing.append(name)
    print(missing)
    return not missing


def large_tables(at):
    database = sqlite3.connect(":memory:")
    numbers = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 50000)"
    database.execute(f"CREATE TABLE t AS {numbers} SELECT i, hex(randomblob(8)) AS text FROM n")
    database.execute("CREATE INDEX by_text ON t (text)")
    database.execute("CREATE TEMP TABLE u AS SELECT DISTINCT text FROM t ORDER BY text DESC")
    database.commit()
    database.execute("VACUUM")
    return database.execute("SELECT count(*) FROM u JOIN t USING (text)").fetchone()[0] >= 50_000


def transactions(at):
    database = sqlite3.connect("")
    database.executescript("BEGIN IMMEDIATE; CREATE TABLE t (a); INSERT INTO t VALUES (1); COMMIT;")
    other = sqlite3.connect(":memory:")
    database.backup(other)
    return other.execute("SELECT a FROM t").fetchone() == (1,)


def event_loops(at):
    async def waited():
        ring = asyncio.Event()
        asyncio.get_running_loop().call_later(0.001, ring.set)
        signal.signal(signal.SIGALRM, lambda *_: None)
        asyncio.get_running_loop().call_soon_threadsafe(print, "woken")
        async with asyncio.timeout(5):
            return await asyncio.gather(ring.wait(), asyncio.sleep(0.001, True))

    return [asyncio.run(waited()) for _ in range(100)][-1] == [True, True]


def dates(at):
    berlin = zoneinfo.ZoneInfo("Europe/Berlin")
    then = datetime.datetime.strptime("2024-07-01 12:00", "%Y-%m-%d %H:%M").replace(tzinfo=berlin)
    return then.utcoffset() == datetime.timedelta(hours=2) and time.localtime().tm_year > 2000


def texts(at):
    ratio = difflib.SequenceMatcher(None, "flotilla", "flotila").ratio()
    return bool(re.search(r"\bann\b", "call ann")) and ratio > 0.9 and json.loads("[1]") == [1]


def numbers(at):
    mean = statistics.fmean(random.sample(range(100), 10))
    return mean < 100 and decimal.Decimal(1) / 4 == decimal.Decimal("0.25")


def chance(at):
    return len({uuid.uuid4().hex, uuid.uuid1().hex, secrets.token_hex(16), os.urandom(8)}) == 4


def packed(at):
    data = b"x" * 10**5
    return gzip.decompress(gzip.compress(data)) == lzma.decompress(lzma.compress(data)) == data


def digests(at):
    return bool(hashlib.scrypt(b"a", salt=b"b", n=2, r=8, p=1)) and bool(hashlib.sha256(b"a"))


def system(at):
    names = (platform.platform(), os.uname().release, os.cpu_count(), os.getcwd())
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return all(names) and limit > used > 0 and os.getpid() > 0


def folders(at):
    return "json" in os.listdir(os.path.dirname(os.__file__)) and os.path.isfile(os.__file__)


def time_limits_of_its_own(at):
    def ring(*_):
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    try:
        time.sleep(5)
    except TimeoutError:
        return True
    finally:
        signal.signal(signal.SIGALRM, before)
    return False


def locks_and_queues(at):
    with threading.Lock(), threading.RLock():
        waited = threading.Event().wait(0.001)
    try:
        queue.Queue().get(timeout=0.001)
    except queue.Empty:
        return not waited
    return False


def pipes(at):
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_inheritable(writer, False)
    os.write(writer, b"x")
    ready = select.select([reader], [], [], 1)[0] == [reader]
    return ready and os.read(os.dup(reader), 2) == b"x"


def memory(at):
    with mmap.mmap(-1, 2**16) as mapped:
        mapped.resize(2**17)
    return len(b"".join([bytes(1000)] * 10_000)) == 10**7


def functions_of_c(at):
    return ctypes.CFUNCTYPE(ctypes.c_int)(lambda: 7)() == 7


def what_there_is_not(at):
    """Absent features raise errors that programs expect."""
    for error, act in (
        (OSError, lambda: subprocess.run(["true"], check=False)),
        (RuntimeError, lambda: threading.Thread(target=print).start()),
        (FileNotFoundError, tempfile.TemporaryFile),
        (OSError, lambda: os.mkdir("/tmp/x")),
    ):
        try:
            act()
        except error:
            continue
        return False
    return True
