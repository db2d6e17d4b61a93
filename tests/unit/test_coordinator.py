"""How ranks fail together: coordinators joined by a function call instead of a network."""

import numpy as np
import pytest

from netsum.host_agent.coordinator import Coordinator
from netsum.host_agent.peer_messages import Abort, Bye, Description, Here, Where
from netsum.host_agent.tensors import host_tensor
from netsum.host_agent.work import Work
from netsum.protocol.errors import (
    AbortedError,
    IntegrityError,
    MismatchError,
    PeersMissingError,
)


@pytest.fixture
def ranks():
    """Three coordinators; what one sends reaches the other at once."""
    coordinators = [Coordinator(rank, 3) for rank in range(3)]

    def deliver(source, target, message):
        receiver = coordinators[target]
        match message:
            case Abort():
                receiver.abort_received(source, message)
            case Where():
                receiver.where_received(source, message)
            case Here():
                receiver.here_received(source, message)

    for rank, coordinator in enumerate(coordinators):
        others = [r for r in range(3) if r != rank]
        coordinator.attach(lambda to, message, rank=rank: deliver(rank, to, message), lambda others=others: others)
    return coordinators


def enter(coordinators, rank, call=0, path="switch", operation=None, numel=10, dtype="float32"):
    description = Description(call, path, call if operation is None else operation, numel, dtype, "sum")
    work = Work(rank, description, host_tensor(np.zeros(1)))
    coordinators[rank].enter(work)
    return work


def test_a_failure_reaches_everyone_and_names_the_rank(ranks):
    works = [enter(ranks, rank) for rank in range(3)]
    stopped = []
    ranks[1].on_failure(stopped.append)
    ranks[0].finish_failed(works[0], "integrity", "element 3 differs")
    assert isinstance(works[0].exception(), IntegrityError)
    assert len(stopped) == 1
    ranks[1].finish_failed(works[1], "aborted", "")
    error = works[1].exception()
    assert isinstance(error, AbortedError)
    assert "rank 0 failed in switch operation 0" in str(error)
    assert "element 3 differs" in str(error)
    with pytest.raises(AbortedError, match="rank 0 failed"):
        ranks[2].check(Description(1, "switch", 1, 5, "float32", "sum"))


def test_missing_ranks_are_those_that_have_not_called(ranks):
    works = [enter(ranks, rank) for rank in (0, 1)]
    ranks[0].finish_failed(works[0], "peers_missing", "30 s", [])
    assert isinstance(works[0].exception(), PeersMissingError)
    assert works[0].exception().missing_ranks == (2,)
    with pytest.raises(AbortedError) as caught:
        ranks[1].check(works[1].description)
    assert caught.value.missing_ranks == (2,)


@pytest.mark.parametrize("change", [{"numel": 11}, {"dtype": "float16"}, {"path": "ring"}])
def test_a_mismatch_is_found_whoever_fails_first(ranks, change):
    mine, theirs = enter(ranks, 0), enter(ranks, 1, **change)
    ranks[0].finish_failed(mine, "peers_missing", "late", [1])
    ranks[1].finish_failed(theirs, "aborted", "")
    for work in (mine, theirs):
        assert isinstance(work.exception(), MismatchError)
        for words in (str(mine.description), str(theirs.description), "rank 0", "rank 1"):
            assert words in str(work.exception())


def test_what_a_rank_that_left_has_completed_may_still_complete(ranks):
    first, second = enter(ranks, 0, call=0), enter(ranks, 0, call=1)
    ranks[0].peer_left(2, Bye(1, 0))
    assert ranks[0].failure == ""
    ranks[0].finish(first)
    assert first.exception() is None
    assert "rank 2 left the job after 1 operations" in ranks[0].failure
    ranks[0].finish_failed(second, "aborted", "")
    assert second.exception().missing_ranks == (2,)


def test_a_rank_that_left_cleanly_is_no_failure_until_it_is_needed(ranks):
    ranks[0].finish(enter(ranks, 0))
    ranks[0].peer_left(1, Bye(1, 0))
    ranks[0].peer_lost(1, "closed")
    assert ranks[0].failure == ""
    with pytest.raises(PeersMissingError, match="rank 1 left"):
        ranks[0].check(Description(1, "switch", 1, 5, "float32", "sum"))


def test_a_dead_rank_counts_more_than_what_its_death_breaks(ranks):
    work = enter(ranks, 0)
    ranks[0].peer_lost(2, "connection reset")
    ranks[0].finish_failed(work, "peers_missing", "ring connection with rank 1: reset", [1])
    assert "rank 2 died" in str(work.exception())
    assert work.exception().missing_ranks == (2,)


def test_leaving_after_a_failure_passes_it_on(ranks):
    enter(ranks, 1)
    ranks[0].peer_lost(2, "connection reset")
    ranks[0].close("closed")
    with pytest.raises(PeersMissingError, match="rank 2 died") as caught:
        ranks[1].check(Description(1, "switch", 1, 10, "float32", "sum"))
    assert caught.value.missing_ranks == (2,)
