"""The ring and the fixed-point path over it, ranks as threads on socket pairs."""

import socket
import threading
import time

import numpy as np
import pytest

from netsum.host_agent import ring_path
from netsum.host_agent.peer_messages import Description
from netsum.host_agent.ring import Ring, RingInterruptedError, RingNeighbourError
from netsum.host_agent.tensors import HostTensor
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.reference import reference_allreduce
from tests.ranks import all_good, run_ranks


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        return near, server.accept()[0]


def make_rings(n: int, timeout_s: float = 5.0) -> list[Ring]:
    links = [tcp_pair() for _ in range(n)]  # link i: from rank i to rank i+1
    return [Ring(r, n, links[r][0], links[(r - 1) % n][1], timeout_s) for r in range(n)]


@pytest.fixture(params=[2, 3, 4])
def rings(request):
    rings = make_rings(request.param)
    yield rings
    for ring in rings:
        ring.close()


@pytest.mark.parametrize("dtype", ["int8", "uint16", "int32", "int64", "float32", "float64", "complex128"])
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 300_001])
def test_sum_is_exact_and_the_same_on_all_ranks(rings, dtype, size):
    n = len(rings)
    arrays = [np.random.default_rng(r).integers(-100, 100, size).astype(dtype) for r in range(n)]
    expected = sum(arrays[1:], arrays[0].copy())
    all_good(run_ranks(lambda r: rings[r].allreduce_sum(arrays[r]), n))
    for array in arrays:
        assert array.tobytes() == expected.tobytes()


def test_float_sums_have_the_same_bits_on_all_ranks(rings):
    n = len(rings)
    arrays = [np.random.default_rng(r).standard_normal(10_007) for r in range(n)]
    expected = np.sum(arrays, axis=0)
    all_good(run_ranks(lambda r: rings[r].allreduce_sum(arrays[r]), n))
    assert len({array.tobytes() for array in arrays}) == 1
    np.testing.assert_allclose(arrays[0], expected, rtol=1e-12, atol=1e-12)


def test_max_of_signed_bytes(rings):
    n = len(rings)
    arrays = [np.random.default_rng(r).integers(-128, 128, 999).astype(np.int8) for r in range(n)]
    expected = np.maximum.reduce(arrays)
    all_good(run_ranks(lambda r: rings[r].allreduce_max(arrays[r]), n))
    for array in arrays:
        np.testing.assert_array_equal(array, expected)


def test_int32_wraps(rings):
    n = len(rings)
    arrays = [np.full(5, 2**31 - 1, np.int32) for _ in range(n)]
    all_good(run_ranks(lambda r: rings[r].allreduce_sum(arrays[r]), n))
    expected = (n * (2**31 - 1) + 2**31) % 2**32 - 2**31
    assert (arrays[0] == expected).all()


@pytest.mark.parametrize("op", ["sum", "avg"])
@pytest.mark.parametrize(
    ("name", "dtype"), [("float32", DType.FLOAT32), ("float16", DType.FLOAT16), ("bfloat16", DType.BFLOAT16)]
)
def test_fixed_point_ring_gives_the_reference_bits(rings, name, dtype, op, monkeypatch):
    monkeypatch.setattr(ring_path, "SEGMENT_ELEMS", 1024)
    n = len(rings)
    inputs = []
    for rank in range(n):
        x = np.random.default_rng(rank).standard_normal(3001).astype(np.float32) * np.float32(10.0) ** (rank - 2)
        x[1500:1800] = 0
        if rank == 0:
            x[[3, 2000]] = np.nan, np.inf
        if rank == 1:
            x[[2000, 2001]] = -np.inf, np.inf
        inputs.append((x.view(np.uint32) >> 16).astype(np.uint16) if name == "bfloat16" else x.astype(name))
    expected = reference_allreduce(inputs, dtype, OpCode.AVG if op == "avg" else OpCode.SUM)
    outputs = [x.copy() for x in inputs]
    all_good(run_ranks(lambda r: ring_path.allreduce(rings[r], HostTensor(outputs[r], name, None), op), n))
    for output in outputs:
        assert output.tobytes() == expected.tobytes()


def test_descriptions_that_differ_are_told_to_all(rings):
    n = len(rings)
    own = [Description(9, "ring", 4, 100 if rank else 200, "float32", "sum") for rank in range(n)]
    for answer in all_good(run_ranks(lambda r: ring_path.agree_on_description(rings[r], own[r]), n)):
        assert answer == dict(enumerate(own))
    same = Description(10, "ring", 5, 100, "int64", "sum")
    assert all_good(run_ranks(lambda r: ring_path.agree_on_description(rings[r], same), n)) == [None] * n


def test_a_silent_neighbour_is_named_and_the_tensor_poisoned():
    rings = make_rings(3, timeout_s=0.3)
    x = np.ones(1000, np.float32)
    with pytest.raises(RingNeighbourError, match="rank 2") as caught:
        ring_path.allreduce(rings[0], HostTensor(x, "float32", None), "sum")
    assert caught.value.rank == 2
    assert np.isnan(x).all()


def test_a_closed_neighbour_is_named():
    rings = make_rings(2)
    rings[1].close()
    with pytest.raises(RingNeighbourError, match="rank 1"):
        rings[0].allreduce_sum(np.ones(1000))


def test_interrupt_ends_a_wait():
    rings = make_rings(2, timeout_s=30)
    threading.Timer(0.1, rings[0].interrupt).start()
    begin_s = time.monotonic()
    with pytest.raises(RingInterruptedError):
        rings[0].allreduce_sum(np.ones(10))
    assert time.monotonic() - begin_s < 5
