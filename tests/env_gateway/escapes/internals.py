# pyright: basic
"""Programs that take the worker that runs them to pieces. Any grade that they give themselves they
could also have returned; no other grade may change."""

import atexit
import builtins
import ctypes
import gc
import io
import json
import mmap
import os
import signal
import sqlite3
import sys
import time

DONE = '{"done": {"result": 1, "stdout": "", "error": null}}'


def found(name):
    """The worker's own object of this class."""
    return next(one for one in gc.get_objects() if type(one).__name__ == name)


def gateway_by_frames(at):
    """The callers of the verifier know no more than the verifier."""
    frame = sys._getframe()
    while frame is not None:
        if at["canary"] in repr(frame.f_globals):
            return True
        frame = frame.f_back
    return False


def caller(name):
    """A local variable of the nearest caller that has it."""
    frame = sys._getframe(1)
    while frame is not None:
        if name in frame.f_locals:
            return frame.f_locals[name]
        frame = frame.f_back
    raise LookupError(name)


def result_by_frames(at):
    worker = caller("self")
    worker._write(json.loads(DONE))
    worker._write(json.loads(DONE))
    time.sleep(600)


def result_by_garbage(at):
    writer = found("Worker")._writer
    writer.write(f"{DONE}\n{DONE}\n")
    writer.flush()
    time.sleep(600)


def readiness_once_more(at):
    found("Worker")._write({"ready": True})
    return 1


def compiled_for_all(at):
    """A cache that returns this for every verifier."""

    class Cache(dict):
        def get(self, key, default=None):
            return compile("def verify(env, **_):\n    return 1\n", "<verifier>", "exec")

    found("Worker")._compiled = Cache()
    return 0


def changed_copy_of_the_database(at):
    """Its own: the next verifier gets another."""
    databases = found("Databases")
    databases.run("current", "SELECT a FROM t", ())
    copy = databases._copies["current"]
    copy.set_authorizer(None)
    copy.execute("PRAGMA query_only = 0")
    copy.execute("UPDATE t SET a = 8")
    copy.commit()
    return copy.execute("SELECT a FROM t").fetchone()[0] == 8


def other_json(at):
    json.dumps = lambda *_, **__: DONE
    return 0


def other_modules(at):
    for name in [name for name in sys.modules if "worker" in name or "dialect" in name]:
        vars(sys.modules[name]).clear()
    return 0


def other_classes(at):
    for kind in (type(found("Worker")), type(found("Databases"))):
        for name in [name for name in vars(kind) if not name.startswith("__")]:
            setattr(kind, name, lambda *_, **__: 1)
    return 0


def other_builtins(at):
    for name in ("len", "str", "repr", "isinstance", "type", "issubclass"):
        setattr(builtins, name, lambda *_: 1)
    return 0


def other_output(at):
    kind = found("Bounded").__class__
    kind.getvalue = lambda self: 7
    return 1


def output_without_end(at):
    kind = found("Bounded").__class__
    kind.getvalue = lambda self: "x" * 2**25
    return 1


def closed_output(at):
    sys.stdout.close()
    sys.stderr.close()
    return 0


def closed_pipes(at):
    os.closerange(0, 64)
    return 1


def exchanged_pipes(at):
    ends = [number for number in range(3, 16) if is_open(number)]
    for one, other in zip(ends, reversed(ends), strict=True):
        os.dup2(one, other)
    return 1


def is_open(number):
    try:
        return bool(os.fstat(number))
    except OSError:
        return False


def blocking_no_more(at):
    """Half of a line gets through, and then an error."""
    for number in range(3, 16):
        if is_open(number):
            os.set_blocking(number, False)
    print("x" * 2**18)
    return 1


def after_the_end(at):
    atexit.register(os.write, 4, DONE.encode())
    sys.exit(0)


def alarm_in_the_worker(at):
    """Raise at any place in the worker, most likely while it writes."""

    def ring(*_):
        raise SystemExit(1)

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)
    print("x" * 2**18)
    return 0


def hooks_everywhere(at):
    def hook(*_):
        builtins.left_behind = True  # pyright: ignore[reportAttributeAccessIssue]
        return None

    sys.settrace(hook)
    sys.setprofile(hook)
    sys.addaudithook(hook)
    sys.excepthook = sys.unraisablehook = sys.displayhook = hook
    gc.callbacks.append(hook)
    sys.meta_path.insert(0, hook)  # pyright: ignore[reportArgumentType]
    sys.path_hooks.insert(0, hook)  # pyright: ignore[reportArgumentType]
    return 0


def no_room_to_answer(at):
    builtins.kept = []  # pyright: ignore[reportAttributeAccessIssue]
    try:
        while True:
            builtins.kept.append(bytes(2**16))  # pyright: ignore[reportAttributeAccessIssue]
    except MemoryError:
        return 0


def no_depth_to_answer(at):
    sys.setrecursionlimit(len(frames()) + 2)
    return 0


def frames():
    frame, seen = sys._getframe(1), []
    while frame is not None:
        seen.append(frame)
        frame = frame.f_back
    return seen


def no_descriptors(at):
    while True:
        try:
            os.dup(0)
        except OSError:
            return 0


def collector_off(at):
    gc.disable()
    gc.freeze()
    return 0


def input_of_another(at):
    found("Worker")._reader = io.StringIO('{"source": "", "function": "x", "arguments": {}}\n' * 9)
    return 0


def sqlite_of_its_own(at):
    sqlite3.connect = lambda *_, **__: None  # pyright: ignore[reportAttributeAccessIssue]
    return 0


def limit_of_output_off(at):
    vars(sys.modules[found("Worker").__module__])["_END_CHARS"] = 2**40
    print("x" * 2**25)
    return 1


def machine_code_of_its_own(at):
    """On x86-64 `int 0x80`: the calls of 32 bits, which have other numbers."""
    code = b"\xb8\x14\x00\x00\x00\xcd\x80\xc3"
    memory = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    memory.write(code)
    place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    return ctypes.CFUNCTYPE(ctypes.c_int)(place)()


def another_worker(at):
    """Serves itself jobs of its own making."""
    kind = type(found("Worker"))
    job = {"source": "def f(env):\n    return 1\n", "function": "f", "arguments": {}}
    kind(io.StringIO(json.dumps(job) + "\n"), found("Worker")._writer).serve()
    return 0
