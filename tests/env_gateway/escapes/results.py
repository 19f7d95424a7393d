# pyright: basic
"""Values that a verifier may return and that are no grade."""

import itertools


class Float:
    def __float__(self):
        return 1.0


class Claimed:
    """Claims to be a number."""

    __class__ = float  # pyright: ignore[reportAssignmentType]

    def __float__(self):
        return 1.0


class Unprintable:
    def __repr__(self):
        raise KeyboardInterrupt("no")


class Endless:
    def __repr__(self):
        return "1" * 2**26


class Text(str):
    def __getitem__(self, key):
        raise SystemExit("no")


class Unshowable(Exception):
    def __str__(self):
        raise SystemExit("no")


def nothing(at):
    return None


def text(at):
    return "1.0"


def text_of_its_own_kind(at):
    return Text("1")


def float_of_its_own_kind(at):
    return Float()


def claimed_float(at):
    return Claimed()


def unprintable(at):
    return Unprintable()


def endless_text(at):
    return Endless()


def generator(at):
    return (1 for _ in itertools.count())


def many(at):
    return [1] * 10**6


def too_large(at):
    return 10**400


def too_large_to_print(at):
    return 10**5000


def infinity(at):
    return float("inf")


def no_number(at):
    return float("nan")


def complex_number(at):
    return 1 + 0j


def error_that_cannot_be_shown(at):
    raise Unshowable


def score_that_is_too_large(at):
    return {"score": 1e308, "passed": ["a"], "failed": []}


def score_that_is_an_object(at):
    return {"score": {"score": 1}, "passed": [], "failed": []}


def checks_that_are_none(at):
    return {"score": 1, "passed": "all", "failed": 0}


def number_of_another_sign(at):
    return -1e308
