"""Ranks of several machines that wait for others in vain."""

from datetime import timedelta

import pytest

from flotilla_common.rpc.free_ports import free_port
from flotilla_learner.rank import rendezvous_store
from flotilla_learner.rank.rendezvous_store import (
    TCP,
    MeetingError,
    connect_store,
    host_store,
    meet_ranks,
)


def test_a_rank_that_never_comes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendezvous_store, "_PATIENCE", timedelta(seconds=1))
    store, rendezvous = host_store("127.0.0.1")
    address = rendezvous.removeprefix(TCP)
    with pytest.raises(MeetingError, match=rf"^rank 1, 2 of 3 has not come to {address} in 1 s"):
        meet_ranks(store, rendezvous, 0, 3)


def test_a_store_where_nobody_listens_is_named_at_once() -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(MeetingError, match=rf"rank 0 at {address} \(Connection refused\): let all"):
        connect_store(f"{TCP}{address}", 2)
