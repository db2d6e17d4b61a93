"""Agents (threads of the test) through a real software switch on loopback: the bits, and how it fails (C06, C26, C29, C32, C33)."""

import logging
import threading
import time

import numpy as np
import pytest

import netsum.host_agent as ha
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.errors import (
    AbortedError,
    MismatchError,
    PeersMissingError,
    SwitchSilentError,
)
from netsum.protocol.reference import reference_allreduce
from netsum.switch.server import SwitchServer
from netsum.switch.settings import SwitchSettings
from tests.e2e.killed_worker import kill_one_of_four
from tests.ranks import all_good, free_port, run_ranks

N = 4


@pytest.fixture(params=["native", "python"])
def any_switch(request):
    with SwitchServer(SwitchSettings("tcp://127.0.0.1:0", "127.0.0.1:0", datapath=request.param)) as server:
        yield server


@pytest.fixture
def switch():
    with SwitchServer(SwitchSettings("tcp://127.0.0.1:0", "127.0.0.1:0")) as server:
        yield server


def with_agents(address, body, n=N, **arguments):
    """``body(agent, rank)`` on n ranks with the switch at ``address``; results by rank, exceptions among them."""
    options = {"job": "test", "timeout_s": 10, "rendezvous": f"127.0.0.1:{free_port()}", "required": bool(address)}
    options |= arguments

    def run(rank):
        with ha.connect(address, rank=rank, world_size=n, **options) as agent:
            return body(agent, rank)

    return run_ranks(run, n, timeout_s=350)


def inputs(size, seed=0, dtype=np.float32, n=N):
    return [np.random.default_rng([seed, rank]).standard_normal(size).astype(dtype) for rank in range(n)]


def test_results_have_the_reference_bits_and_the_rings(any_switch):
    """Sums, averages, odd sizes, non-finite values, float16, int32, and the exact ring beside the switch; many at once."""
    special = inputs(10_000, seed=3)
    special[0][5], special[1][5], special[2][777], special[3][9_999] = np.nan, 1.0, -np.inf, np.inf
    integers = [np.random.default_rng(rank).integers(-(2**31), 2**31, 5000).astype(np.int32) for rank in range(N)]
    cases = [
        (inputs(1, seed=1), DType.FLOAT32, "sum"),
        (inputs(100_003, seed=2), DType.FLOAT32, "avg"),
        (special, DType.FLOAT32, "sum"),
        (integers, DType.INT32, "sum"),
        (inputs(4093, seed=4, dtype=np.float16), DType.FLOAT16, "avg"),
        (inputs(257, seed=5), DType.FLOAT32, "sum"),
    ]

    def body(agent, rank):
        tensors = [tensors[rank].copy() for tensors, _, _ in cases]
        works = [agent.allreduce(x, op=op, async_op=True) for x, (_, _, op) in zip(tensors, cases, strict=True)]
        doubles = np.array([1 + rank * 1e-12])
        works.append(agent.allreduce(doubles, op="avg", async_op=True))
        strided = np.zeros((64, 50), np.float32)
        strided[::2, 3:40] = rank
        works.append(agent.allreduce(strided[::2, 3:40], async_op=True))
        for work in works:
            work.wait()
        return tensors, doubles, strided, agent.status()

    by_switch = all_good(with_agents(any_switch.control_endpoint, body))
    by_ring = all_good(with_agents(None, body))
    for tensors, doubles, strided, status in by_switch:
        assert status.path == "switch"
        assert status.results in ("multicast", "unicast")
        assert status.counters["packets_out"] > 0
        assert status.operations_completed == len(cases) + 2
        for position, (x, (xs, dtype, op)) in enumerate(zip(tensors, cases, strict=True)):
            expected = reference_allreduce(xs, dtype, OpCode.AVG if op == "avg" else OpCode.SUM)
            assert x.tobytes() == expected.tobytes()
            assert x.tobytes() == by_ring[0][0][position].tobytes()
        assert abs(doubles[0] - (1 + 1.5e-12)) < 1e-15
        assert (strided[::2, 3:40] == 6).all()
        assert not strided[1::2].any()


@pytest.mark.parametrize("n", [2, 3, 5])
def test_other_world_sizes(switch, n):
    def body(agent, rank):
        x = inputs(20_001, n=n)[rank]
        agent.allreduce(x)
        return x

    expected = reference_allreduce(inputs(20_001, n=n), DType.FLOAT32)
    for x in all_good(with_agents(switch.control_endpoint, body, n)):
        assert x.tobytes() == expected.tobytes()


@pytest.mark.parametrize("chunk_elems", [64, 256, 2048])
def test_packet_size_changes_no_bit(switch, monkeypatch, chunk_elems):
    monkeypatch.setenv("NETSUM_CHUNK_ELEMS", str(chunk_elems))

    def body(agent, rank):
        x = inputs(10_007)[rank]
        agent.allreduce(x)
        return x, agent.status().chunk_elems

    expected = reference_allreduce(inputs(10_007), DType.FLOAT32)
    for x, used in all_good(with_agents(switch.control_endpoint, body)):
        assert x.tobytes() == expected.tobytes()
        assert used == chunk_elems


@pytest.mark.parametrize(
    "faults",
    ["loss=1%,seed=1", "loss=5%,duplicate=5%,seed=2", "reorder=25%,delay=0-5ms,loss=1%,seed=3"],
)
def test_loss_duplication_reordering(switch, monkeypatch, faults):
    """C32, shortened."""
    monkeypatch.setenv("NETSUM_FAULTS", faults)
    rounds = 6

    def body(agent, rank):
        tensors = [inputs(100_003, seed=i)[rank] for i in range(rounds)]
        for work in [agent.allreduce(x, async_op=True) for x in tensors]:
            work.wait()
        return tensors, agent.status().counters

    results = all_good(with_agents(switch.control_endpoint, body, timeout_s=30))
    for i in range(rounds):
        expected = reference_allreduce(inputs(100_003, seed=i), DType.FLOAT32).tobytes()
        assert all(tensors[i].tobytes() == expected for tensors, _ in results)
    counters = [counters for _, counters in results]
    assert sum(c["fast_retransmits"] + c["timer_retransmits"] for c in counters) > 0


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("faults", ["loss=1%,seed=1", "loss=5%,duplicate=5%,reorder=25%,delay=0-20ms,seed=2"])
def test_hundred_allreduces_under_faults(switch, monkeypatch, faults):
    """C32 in full, one at a time as a training loop does it."""
    monkeypatch.setenv("NETSUM_FAULTS", faults)

    def body(agent, rank):
        digests = []
        for i in range(100):
            x = inputs(100_003, seed=i)[rank]
            agent.allreduce(x)
            digests.append(hash(x.tobytes()))
        return digests

    expected = [hash(reference_allreduce(inputs(100_003, seed=i), DType.FLOAT32).tobytes()) for i in range(100)]
    for digests in all_good(with_agents(switch.control_endpoint, body, timeout_s=60)):
        assert digests == expected


class TestMismatch:
    """C26; a fresh job on the same switch is right afterwards."""

    @pytest.mark.parametrize(
        ("tensors", "said"),
        [
            ([np.ones(256_000, np.float32), np.ones(512_000, np.float32)], ["256000 float32", "512000 float32"]),
            ([np.ones(2560, np.float32), np.ones(5120, np.float32)], ["2560 float32", "5120 float32"]),
            ([np.ones(1000, np.float32), np.ones(2000, np.float16)], ["1000 float32", "2000 float16"]),
            ([np.ones(1000, np.float32), np.ones(1000, np.float64)], ["1000 float32", "1000 float64"]),
        ],
    )
    def test_size_or_dtype(self, switch, tensors, said):
        begin_s = time.monotonic()
        results = with_agents(switch.control_endpoint, lambda agent, rank: agent.allreduce(tensors[rank].copy()), 2)
        assert time.monotonic() - begin_s < 10
        for error in results:
            assert isinstance(error, MismatchError)
            for words in [*said, "rank 0", "rank 1", "operation 0"]:
                assert words in str(error)

        def fresh(agent, rank):
            x = np.ones(1000, np.float32)
            agent.allreduce(x)
            return x

        for x in all_good(with_agents(switch.control_endpoint, fresh, 2)):
            assert (x == 2).all()

    def test_one_call_more(self, switch):
        def body(agent, rank):
            for _ in range(2 - rank):
                agent.allreduce(np.ones(100, np.float32))

        results = with_agents(switch.control_endpoint, body, 2)
        assert isinstance(results[0], PeersMissingError)
        assert "rank 1 left the job after 1 operations" in str(results[0])
        assert results[1] is None


def test_a_straggler_is_named_in_the_log_and_is_no_error(switch, caplog):
    """C33."""

    def body(agent, rank):
        x = np.ones(100_000, np.float32)
        if rank == 1:
            time.sleep(3.5)
        agent.allreduce(x)
        return x, agent.status().counters

    with caplog.at_level(logging.WARNING):
        for x, counters in all_good(with_agents(switch.control_endpoint, body, 3)):
            assert (x == 3).all()
            assert counters["fast_retransmits"] + counters["timer_retransmits"] < 200
    assert any("waits for rank 1 in switch operation 0" in record.getMessage() for record in caplog.records)


def test_an_absent_rank_ends_in_an_error_that_names_it(switch):
    done = threading.Event()

    def body(agent, rank):
        if rank == 2:
            done.wait(15)
            return
        try:
            agent.allreduce(np.ones(1000, np.float32))
        finally:
            if rank == 0:
                done.set()

    results = with_agents(switch.control_endpoint, body, 3, timeout_s=2)
    assert all(isinstance(error, PeersMissingError | AbortedError) for error in results[:2])
    assert any(isinstance(error, PeersMissingError) for error in results[:2])
    assert all(error.missing_ranks == (2,) for error in results[:2])


def test_a_killed_worker_is_named_and_the_switch_is_free_again(switch):
    """C29: SIGKILL while a tensor is in flight; nobody receives a partial sum."""
    rendezvous = f"127.0.0.1:{free_port()}"
    survivors = kill_one_of_four(switch.control_endpoint, rendezvous, into_step_s=0.02, required=True)
    for error, after_s, x in survivors:
        assert "rank 2 died" in str(error)
        assert error.missing_ranks == (2,)
        assert after_s < 10
        assert np.isin(x[~np.isnan(x)], [1, 4]).all()

    def fresh(agent, rank):
        x = np.ones(1000, np.float32)
        agent.allreduce(x)
        return x

    for x in all_good(with_agents(switch.control_endpoint, fresh)):
        assert (x == 4).all()


def test_the_switch_goes_away_in_mid_job():
    server = SwitchServer(SwitchSettings("tcp://127.0.0.1:0", "127.0.0.1:0"))
    server.start()

    def body(agent, rank):
        agent.allreduce(np.ones(1000, np.float32))
        barrier.wait(10)
        if rank == 0:
            server.close()
        barrier.wait(10)
        agent.allreduce(np.ones(1000, np.float32))

    barrier = threading.Barrier(2)
    begin_s = time.monotonic()
    results = with_agents(server.control_endpoint, body, 2)
    assert time.monotonic() - begin_s < 15
    for error in results:
        assert isinstance(error, SwitchSilentError | AbortedError)
        assert "switch" in str(error)


def test_one_rank_without_the_switch_takes_all_to_the_ring(switch, caplog, monkeypatch):
    monkeypatch.setenv("NETSUM_CONNECT_TIMEOUT_S", "0.7")
    rendezvous = f"127.0.0.1:{free_port()}"
    nowhere = f"tcp://127.0.0.1:{free_port()}"

    def body(rank):
        address = nowhere if rank == 1 else switch.control_endpoint
        with ha.connect(address, job="test", rank=rank, world_size=3, rendezvous=rendezvous, timeout_s=10) as agent:
            x = np.ones(100, np.float32)
            agent.allreduce(x)
            return x, agent.status()

    begin_s = time.monotonic()
    with caplog.at_level(logging.WARNING):
        results = all_good(run_ranks(body, 3))
    assert time.monotonic() - begin_s < 5
    for x, status in results:
        assert (x == 3).all()
        assert status.path == "ring"
        assert nowhere in status.reason
    assert sum("path now used: ring" in record.getMessage() for record in caplog.records) == 3


def test_two_jobs_at_once(switch):
    def job(name):
        def body(agent, rank):
            for i in range(20):
                x = np.full(3000, name + rank + i, np.float32)
                agent.allreduce(x)
                assert (x == 2 * (name + i) + 1).all()
            return agent.status().job_number

        return all_good(with_agents(switch.control_endpoint, body, 2, job=f"job{name}"))

    numbers = all_good(run_ranks(job, 2))
    assert len({number for pair in numbers for number in pair}) == 2


def test_secret(monkeypatch):
    from netsum.protocol.job_settings import JobTableSettings

    settings = SwitchSettings("tcp://127.0.0.1:0", "127.0.0.1:0", jobs=JobTableSettings(secret="s"))
    with SwitchServer(settings) as server:

        def body(agent, rank):
            agent.allreduce(np.ones(10, np.float32))
            return agent.status().path

        assert with_agents(server.control_endpoint, body, 2, secret="s") == ["switch", "switch"]
        assert with_agents(server.control_endpoint, body, 2, required=False) == ["ring", "ring"]
