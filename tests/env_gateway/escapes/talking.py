# pyright: basic
"""Programs that talk to the gateway themselves, in the name of the process they run in."""

import fcntl
import gc
import json
import os
import stat
import time

ATTACH = {"query": "ATTACH DATABASE '/etc/passwd' AS other", "db": "current", "args": []}
DONE = {"result": 1, "stdout": "", "error": None}


def wire():
    """The descriptor on which the process speaks to the gateway."""
    for descriptor in range(3, 64):
        try:
            mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
            if stat.S_ISFIFO(os.fstat(descriptor).st_mode) and mode == os.O_WRONLY:
                return descriptor
        except OSError:
            continue
    raise LookupError("no descriptor leads to the gateway")


def send(*messages):
    for message in messages:
        line = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
        while line:
            line = line[os.write(wire(), line) :]


def wait():
    time.sleep(600)


def garbage(at):
    send(b"\xff\xfe\x00 not the protocol\n")
    wait()


def no_object(at):
    send(b"[1, 2]\n")
    wait()


def deeply_nested(at):
    send(b"[" * 10**6 + b"\n")
    wait()


def huge_number(at):
    send(b'{"done": {"stdout": "", "result": ' + b"9" * 10_000 + b"}}\n")
    wait()


def line_without_end(at):
    while True:
        send(b"x" * 2**16)


def half_a_line(at):
    send(b'{"done": {"result": 1, ')
    os._exit(0)


def many_lines(at):
    while True:
        send({"ready": True})


def questions_without_reading_answers(at):
    while True:
        send({"snapshot": "current"})


def copies_again_and_again(at):
    """Each costs the gateway as much as the database is large, and the environment too."""
    worker = next(one for one in gc.get_objects() if type(one).__name__ == "Worker")
    return all(worker._request_gateway({"snapshot": "current"}) for _ in range(3))


def unknown_database(at):
    send({"snapshot": "../../journal"})
    wait()


def statements_for_the_gateways_own_files(at):
    send({"snapshot": "current"}, ATTACH)
    wait()


def statements_without_a_reason(at):
    send(ATTACH)
    wait()


def result_of_another_type(at):
    send({"done": DONE | {"result": {"reward": 1}}})
    wait()


def output_of_another_type(at):
    send({"done": DONE | {"stdout": 7}})
    wait()


def error_of_another_type(at):
    send({"done": DONE | {"error": ["no"]}})
    wait()


def infinite_result(at):
    send({"done": DONE | {"result": float("inf")}})
    wait()


def no_number_as_result(at):
    send({"done": DONE | {"result": float("nan")}})
    wait()
