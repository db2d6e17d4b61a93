"""The agent without a switch: the ring takes over (cases C15, C16, C26, C29, C30)."""

import http.server
import logging
import threading
import time

import numpy as np
import pytest

import netsum.host_agent as ha
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.errors import (
    AbortedError,
    JoinRefusedError,
    MismatchError,
    OperationError,
    PeersMissingError,
    SwitchUnreachableError,
    UnsupportedError,
    UsageError,
)
from netsum.protocol.reference import reference_allreduce
from tests.e2e.killed_worker import kill_one_of_four
from tests.ranks import all_good, free_port, run_ranks

N = 4


@pytest.fixture
def rendezvous():
    return f"127.0.0.1:{free_port()}"


def with_agents(rendezvous, body, n=N, switch=None, **arguments):
    """``body(agent, rank)`` on n ranks; results by rank, exceptions among them."""

    def run(rank):
        options = {"timeout_s": 10} | arguments
        with ha.connect(switch, job="test", rank=rank, world_size=n, rendezvous=rendezvous, **options) as agent:
            return body(agent, rank)

    return run_ranks(run, n)


def normals(rank, size, dtype=np.float32):
    return np.random.default_rng(rank).standard_normal(size).astype(dtype)


def test_many_operations_in_flight_have_the_reference_bits(rendezvous):
    sizes = [1, 255, 256, 257, 5000, 100_003]

    def body(agent, rank):
        tensors = [normals(rank, size) for size in sizes]
        works = [agent.allreduce(tensor, op="sum", async_op=True) for tensor in tensors]
        for work in works:
            work.wait()
            assert work.done()
            assert work.exception() is None
        return tensors, agent.status()

    for tensors, status in all_good(with_agents(rendezvous, body)):
        assert (status.path, status.reason) == ("ring", "no switch configured")
        assert status.operations_completed == len(sizes)
        assert status.counters["ring_bytes_out"] > 0
        for size, tensor in zip(sizes, tensors, strict=True):
            expected = reference_allreduce([normals(r, size) for r in range(N)], DType.FLOAT32)
            assert tensor.tobytes() == expected.tobytes()


def test_float64_and_int64_are_exact(rendezvous):
    """C15."""

    def body(agent, rank):
        doubles = np.array([1 + rank * 1e-12])
        agent.allreduce(doubles, op="avg")
        integers = np.array([2**40 + rank])
        agent.allreduce(integers)
        return doubles[0], integers[0]

    for mean, total in all_good(with_agents(rendezvous, body)):
        assert abs(mean - (1 + 1.5e-12)) < 1e-15
        assert total == 4 * 2**40 + 6


@pytest.mark.parametrize("n", [1, 2])
def test_empty_tensors_between_others(rendezvous, n):
    """C16."""

    def body(agent, rank):
        a, empty, b = normals(rank, 1000), np.empty((0, 5), np.float32), normals(rank + 10, 10)
        for tensor in (a, empty, b):
            agent.allreduce(tensor, op="avg")
        return a, b

    for a, b in all_good(with_agents(rendezvous, body, n)):
        for tensor, seed, size in ((a, 0, 1000), (b, 10, 10)):
            inputs = [normals(seed + r, size) for r in range(n)]
            expected = inputs[0] if n == 1 else reference_allreduce(inputs, DType.FLOAT32, OpCode.AVG)
            assert tensor.tobytes() == expected.tobytes()


def test_one_rank_opens_no_socket():
    with ha.connect("tcp://127.0.0.1:1", job="test", rank=0, world_size=1) as agent:
        x = np.ones(3, np.int64)
        agent.allreduce(x)
        assert (x == 1).all()
        assert agent.status().path == "ring"
        assert agent.status().run_id == ""


def test_strided_arrays_and_other_layouts(rendezvous):
    def body(agent, rank):
        base = np.zeros((40, 60), np.float32)
        strided = base[::2, 5:50]
        strided[...] = rank + 1
        fortran = np.asfortranarray(np.full((3, 4), rank, np.float64))
        swapped = np.full(7, rank, ">i4")
        scalar = np.array(float(rank), np.float32)
        for tensor in (strided, fortran, swapped, scalar):
            agent.allreduce(tensor)
        assert not base[1::2].any()
        assert not base[:, :5].any()
        return strided, fortran, swapped, scalar

    for strided, fortran, swapped, scalar in all_good(with_agents(rendezvous, body, 2)):
        assert (strided == 3).all()
        assert (fortran == 1).all()
        assert (swapped == 1).all()
        assert scalar == 1


@pytest.mark.torch
def test_torch_tensors(rendezvous):
    torch = pytest.importorskip("torch")

    def body(agent, rank):
        half = torch.full((300,), 0.5 + rank, dtype=torch.bfloat16)
        transposed = torch.full((3, 5), float(rank)).t()
        parameter = torch.nn.Parameter(torch.ones(4))
        longs = torch.tensor([2**40 + rank])
        for tensor in (half, transposed, parameter, longs):
            agent.allreduce(tensor)
        with pytest.raises(UnsupportedError, match="meta"):
            agent.allreduce(torch.ones(3, device="meta"))
        with pytest.raises(UnsupportedError, match="sparse"):
            agent.allreduce(torch.eye(3).to_sparse())
        with pytest.raises(UsageError, match="share memory"):
            agent.allreduce(torch.ones(1).expand(5))
        return half, transposed, parameter, longs

    for half, transposed, parameter, longs in all_good(with_agents(rendezvous, body, 2)):
        assert (half == 2).all()
        assert (transposed == 1).all()
        assert transposed.stride() == (1, 5)
        assert (parameter == 2).all()
        assert longs[0] == 2 * 2**40 + 1


def test_what_is_refused_before_anything_is_sent(rendezvous):
    def body(agent, rank):
        read_only = np.ones(3)
        read_only.flags.writeable = False
        for tensor, op, error in (
            (read_only, "sum", UsageError),
            (np.ones(3, np.int32), "avg", UnsupportedError),
            (np.array(["x"]), "sum", UnsupportedError),
            ([1.0], "sum", UsageError),
            (np.ones(3), "max", UsageError),
        ):
            with pytest.raises(error):
                agent.allreduce(tensor, op=op)
        x = np.ones(3)
        agent.allreduce(x)
        return x

    for x in all_good(with_agents(rendezvous, body, 2)):
        assert (x == 2).all()


@pytest.mark.parametrize("arguments", [{"rank": -1}, {"world_size": 0}, {"world_size": 2000}, {"timeout_s": 0}])
def test_wrong_arguments(arguments):
    with pytest.raises(UsageError):
        ha.connect(**({"job": "test", "rank": 0, "world_size": 2} | arguments))


class TestMismatch:
    """C26."""

    @pytest.mark.parametrize(
        ("tensors", "said"),
        [
            ([np.ones(256_000, np.float32), np.ones(512_000, np.float32)], ["256000 float32", "512000 float32"]),
            ([np.ones(2560, np.float32), np.ones(5120, np.float32)], ["2560 float32", "5120 float32"]),
            ([np.ones(1000, np.float32), np.ones(2000, np.float16)], ["1000 float32", "2000 float16"]),
        ],
    )
    def test_size_or_dtype(self, rendezvous, tensors, said):
        results = with_agents(rendezvous, lambda agent, rank: agent.allreduce(tensors[rank].copy()), 2)
        for error in results:
            assert isinstance(error, MismatchError)
            for words in [*said, "rank 0", "rank 1", "operation 0"]:
                assert words in str(error)

    def test_one_call_more(self, rendezvous):
        def body(agent, rank):
            for _ in range(2 - rank):
                agent.allreduce(np.ones(100, np.float32))

        begin_s = time.monotonic()
        results = with_agents(rendezvous, body, 2)
        assert isinstance(results[0], PeersMissingError)
        assert "rank 1 left the job after 1 operations" in str(results[0])
        assert results[0].missing_ranks == (1,)
        assert results[1] is None
        assert time.monotonic() - begin_s < 8


def test_an_exception_on_one_rank_is_told_to_the_others(rendezvous):
    def body(agent, rank):
        agent.allreduce(np.ones(100, np.float32))
        if rank == 1:
            raise ValueError("the user's own")
        agent.allreduce(np.ones(100, np.float32))

    results = with_agents(rendezvous, body, 3)
    assert isinstance(results[1], ValueError)
    for rank in (0, 2):
        assert isinstance(results[rank], OperationError)
        assert "rank 1" in str(results[rank])
        assert "the user's own" in str(results[rank])


def test_close_fails_what_is_outstanding_here_and_there(rendezvous):
    def body(agent, rank):
        if rank == 0:
            time.sleep(1)
            agent.close()
            agent.close()
            with pytest.raises(AbortedError):
                agent.allreduce(np.ones(5))
            return
        work = agent.allreduce(np.ones(100, np.float32), async_op=True)
        with pytest.raises(PeersMissingError, match="still under way"):
            work.wait(timeout_s=0.1)
        seen = []
        work.add_done_callback(lambda done: seen.append(done.exception()))
        begin_s = time.monotonic()
        if rank == 1:
            agent.close()
            assert time.monotonic() - begin_s < 2
        with pytest.raises(OperationError) as caught:
            work.wait()
        assert seen == [caught.value]
        raise caught.value

    results = with_agents(rendezvous, body, 3)
    assert results[0] is None
    assert isinstance(results[1], AbortedError)
    assert isinstance(results[2], OperationError)
    assert "rank 1" in str(results[2])


def test_a_straggler_is_named_in_the_log_and_is_no_error(rendezvous, caplog):
    """C33."""

    def body(agent, rank):
        x = np.ones(1000, np.float32)
        if rank == 1:
            time.sleep(3.5)
        agent.allreduce(x)
        return x

    with caplog.at_level(logging.WARNING):
        for x in all_good(with_agents(rendezvous, body, 3)):
            assert (x == 3).all()
    assert any("waits for rank 1 in ring operation 0" in record.getMessage() for record in caplog.records)


def test_an_absent_rank_ends_in_an_error_that_names_it(rendezvous):
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

    results = with_agents(rendezvous, body, 3, timeout_s=2)
    assert all(isinstance(results[rank], OperationError) for rank in (0, 1))
    assert any(isinstance(error, PeersMissingError) and error.missing_ranks == (2,) for error in results[:2])
    assert all("2" in str(error) for error in results[:2])


def test_a_killed_worker_is_named(rendezvous):
    """C29: SIGKILL while a tensor is in flight."""
    for error, after_s, x in kill_one_of_four(None, rendezvous, into_step_s=0.05):
        assert "rank 2 died" in str(error)
        assert error.missing_ranks == (2,)
        assert after_s < 5
        assert np.isnan(x).all() or (x == 1).all()


class TestNoSwitch:
    """C30: what listens at the switch's address is nothing, or something else."""

    @pytest.fixture(params=["closed port", "HTTP server"])
    def address(self, request):
        if request.param == "closed port":
            yield f"tcp://127.0.0.1:{free_port()}"
            return
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"tcp://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        server.server_close()

    def test_the_ring_takes_over_with_one_warning_a_rank(self, address, rendezvous, caplog, monkeypatch):
        monkeypatch.setenv("NETSUM_CONNECT_TIMEOUT_S", "0.7")

        def body(agent, rank):
            x = normals(rank, 10_000)
            agent.allreduce(x, op="avg")
            return x, agent.status()

        begin_s = time.monotonic()
        with caplog.at_level(logging.WARNING):
            results = all_good(with_agents(rendezvous, body, switch=address))
        assert time.monotonic() - begin_s < 6
        expected = reference_allreduce([normals(r, 10_000) for r in range(N)], DType.FLOAT32, OpCode.AVG)
        for x, status in results:
            assert x.tobytes() == expected.tobytes()
            assert status.path == "ring"
            assert address in status.reason
            assert status.switch == address
        warnings = [r.getMessage() for r in caplog.records if "path now used: ring" in r.getMessage()]
        assert len(warnings) == N
        assert all(address in text for text in warnings)

    def test_required_refuses(self, address, rendezvous, monkeypatch):
        monkeypatch.setenv("NETSUM_CONNECT_TIMEOUT_S", "0.5")
        results = with_agents(rendezvous, lambda agent, rank: None, 2, switch=address, required=True)
        for error in results:
            assert isinstance(error, SwitchUnreachableError)
            assert address in str(error)


def test_required_without_an_address(rendezvous):
    results = with_agents(rendezvous, lambda agent, rank: None, 2, required=True)
    assert all(isinstance(error, SwitchUnreachableError) for error in results)


def test_secret(rendezvous):
    def body(rank):
        with ha.connect(
            None, job="test", rank=rank, world_size=2, rendezvous=rendezvous, timeout_s=2, secret=f"secret{rank}"
        ):
            pass

    results = run_ranks(body, 2)
    assert isinstance(results[1], JoinRefusedError)
    assert results[1].code == "secret"
