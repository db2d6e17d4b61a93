"""Switch and workers together in virtual time: exact sums under every fault, errors where there must be errors."""

from __future__ import annotations

import numpy as np
import pytest

from netsum.emulator.faults import LinkFaults
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.reference import reference_allreduce
from tests.sim.jobs import FORMS, make_job, random_tensors, submit_all

LOSSY = LinkFaults(loss=0.05, duplicate=0.05, delay_us=(20, 400))
HARSH = LinkFaults(loss=0.2, duplicate=0.2, delay_us=(20, 2000), late_share=0.05, late_us=60_000)

pytestmark = pytest.mark.parametrize("form", FORMS)


def bits(x: np.ndarray) -> bytes:
    return x.tobytes()


@pytest.mark.parametrize("chunk_elems", [64, 256, 512, 1024, 2048])
@pytest.mark.parametrize("numel", [1, 255, 257, 5000, 20_011])
def test_every_rank_gets_the_reference_bits(form: str, chunk_elems: int, numel: int) -> None:
    tensors = random_tensors(np.random.default_rng(numel), 3, numel, DType.FLOAT32)
    expected = reference_allreduce(tensors, DType.FLOAT32)
    network = make_job(form, 3, chunk_elems=chunk_elems)
    submit_all(network, tensors, DType.FLOAT32)
    assert network.run_all(1, 1_000_000)
    assert [c[0].error for c in network.completions] == ["none"] * 3
    assert all(bits(t) == bits(expected) for t in tensors)
    assert network.switch.slots_in_use(3) == 0


@pytest.mark.parametrize("dtype", list(DType))
@pytest.mark.parametrize("op", list(OpCode))
def test_dtypes_and_ops(form: str, dtype: DType, op: OpCode) -> None:
    if dtype is DType.INT32 and op is OpCode.AVG:
        pytest.skip("an average of integers is refused by the agent, above the machines")
    tensors = random_tensors(np.random.default_rng(1), 4, 3000, dtype)
    expected = reference_allreduce(tensors, dtype, op)
    network = make_job(form, 4)
    submit_all(network, tensors, dtype, op)
    assert network.run_all(1, 1_000_000)
    assert all(bits(t) == bits(expected) for t in tensors)


@pytest.mark.parametrize("faults", [LOSSY, HARSH], ids=["lossy", "harsh"])
@pytest.mark.parametrize("chunk_elems", [64, 512])
@pytest.mark.parametrize("seed", range(4))
def test_faults_change_no_bit(form: str, faults: LinkFaults, chunk_elems: int, seed: int) -> None:
    """C32: loss, duplication, reordering, delays over several rounds; several operations in flight, of different types and sizes."""
    rng = np.random.default_rng(seed)
    batch = [
        (random_tensors(rng, 3, int(numel), dtype), dtype)
        for numel, dtype in zip(rng.integers(1, 9000, 6), [*DType, DType.FLOAT32, DType.INT32], strict=True)
    ]
    expected = [reference_allreduce(tensors, dtype) for tensors, dtype in batch]
    network = make_job(form, 3, chunk_elems=chunk_elems, up=faults, down=faults, seed=seed)
    for tensors, dtype in batch:
        submit_all(network, tensors, dtype)
    assert network.run_all(len(batch), 60_000_000)
    for (tensors, _), right in zip(batch, expected, strict=True):
        assert all(bits(t) == bits(right) for t in tensors)
    assert network.switch.slots_in_use(3) == 0
    resent = sum(w.counters["fast_retransmits"] + w.counters["timer_retransmits"] for w in network.workers)
    assert resent > 0


def test_running_number_wraps(form: str) -> None:
    tensors = random_tensors(np.random.default_rng(2), 2, 30_000, DType.FLOAT32)
    expected = reference_allreduce(tensors, DType.FLOAT32)
    network = make_job(form, 2, first_number=2**24 - 64, up=LOSSY, down=LOSSY, seed=9)
    submit_all(network, tensors, DType.FLOAT32)
    assert network.run_all(1, 60_000_000)
    assert all(bits(t) == bits(expected) for t in tensors)


@pytest.mark.parametrize("chunk_elems", [64, 256, 1024])
def test_non_finite_elements_reach_every_rank(form: str, chunk_elems: int) -> None:
    """C01, and whole tensors that are not finite (an AMP overflow step)."""
    tensors = random_tensors(np.random.default_rng(3), 4, 3001, DType.FLOAT32)
    tensors[2][700] = np.nan
    tensors[0][1500], tensors[1][1500] = np.inf, np.inf
    tensors[3][1501] = -np.inf
    tensors[0][2999], tensors[3][2999] = np.inf, -np.inf
    expected = reference_allreduce(tensors, DType.FLOAT32)
    assert np.isnan(expected[[700, 2999]]).all()
    assert expected[1500] == np.inf
    assert expected[1501] == -np.inf
    assert np.isfinite(np.delete(expected, [700, 1500, 1501, 2999])).all()
    network = make_job(form, 4, chunk_elems=chunk_elems, up=LOSSY, down=LOSSY, seed=1)
    submit_all(network, tensors, DType.FLOAT32)
    whole = [np.full(5000, np.inf, np.float32) for _ in range(4)]
    submit_all(network, whole, DType.FLOAT32)
    assert network.run_all(2, 60_000_000)
    assert all(bits(t) == bits(expected) for t in tensors)
    assert all((t == np.inf).all() for t in whole)


def test_full_size_packets_where_short_exponents_are_not_offered(form: str) -> None:
    tensors = random_tensors(np.random.default_rng(4), 2, 5000, DType.FLOAT32)
    expected = reference_allreduce(tensors, DType.FLOAT32)
    network = make_job(form, 2, short_exponents=False)
    submit_all(network, tensors, DType.FLOAT32)
    assert network.run_all(1, 1_000_000)
    assert all(bits(t) == bits(expected) for t in tensors)
    assert {len(d) for *_, d in network.trace} == {1034}


def test_clean_run_sends_each_packet_once(form: str) -> None:
    """Count: 20 chunks, 8 slots: 8 exponent packets, 20 with payload, 1 with integrity elements, from each worker."""
    tensors = random_tensors(np.random.default_rng(5), 2, 20 * 256, DType.FLOAT32)
    in_order = LinkFaults(delay_us=(30, 30))
    network = make_job(form, 2, up=in_order, down=in_order)
    submit_all(network, tensors, DType.FLOAT32)
    assert network.run_all(1, 1_000_000)
    assert [w.counters["packets_out"] for w in network.workers] == [29, 29]
    assert network.switch.counters["results"] == 29


def test_silent_switch_is_an_error_within_the_deadline(form: str) -> None:
    dead = LinkFaults(loss=1.0)
    tensors = random_tensors(np.random.default_rng(6), 2, 1000, DType.FLOAT32)
    network = make_job(form, 2, down=dead)
    submit_all(network, tensors, DType.FLOAT32)
    assert network.run_all(1, 6_000_000)
    assert {c[0].error for c in network.completions} == {"switch_silent"}
    assert network.now_us >= 5_000_000


def test_straggler_is_waited_for_with_few_probes_and_named_after_the_deadline(form: str) -> None:
    """C33: no error for 5 s, bounded retransmission; PENDING says who; after the straggler deadline an error names the rank."""
    tensors = random_tensors(np.random.default_rng(7), 3, 100_000, DType.FLOAT32)
    expected = reference_allreduce(tensors, DType.FLOAT32)
    network = make_job(form, 3, slots=64)
    for rank in (0, 2):
        network.workers[rank].submit(tensors[rank], DType.FLOAT32, OpCode.SUM, 0)
        network.kick(rank)
    assert not network.run(until=lambda: any(network.completions), limit_us=5_000_000)
    assert network.workers[0].counters["timer_retransmits"] < 60
    assert network.switch.awaited_ranks(3) == [1]
    network.now_us = 5_000_000
    network.workers[1].submit(tensors[1], DType.FLOAT32, OpCode.SUM, network.now_us)
    network.kick(1)
    assert network.run_all(1, 20_000_000)
    assert all(bits(t) == bits(expected) for t in tensors)

    more = random_tensors(np.random.default_rng(8), 3, 100, DType.FLOAT32)
    for rank in (0, 2):
        network.workers[rank].submit(more[rank], DType.FLOAT32, OpCode.SUM, network.now_us)
        network.kick(rank)
    assert network.run(until=lambda: len(network.completions[0]) == 2, limit_us=60_000_000)
    completion = network.completions[0][1]
    assert (completion.error, list(completion.missing_ranks)) == ("peers_missing", [1])


def test_corruption_is_never_a_result(form: str) -> None:
    """A flipped bit beyond the UDP checksum: the sum is right or the operation fails on some rank; no rank returns other bits."""
    failures = 0
    for seed in range(30):
        tensors = random_tensors(np.random.default_rng(seed), 3, 6000, DType.FLOAT32)
        expected = reference_allreduce(tensors, DType.FLOAT32)
        flips = LinkFaults(corrupt=0.01)
        network = make_job(form, 3, up=flips, down=flips, seed=seed, straggler_timeout_us=2_000_000)
        submit_all(network, tensors, DType.FLOAT32)
        assert network.run_all(1, 60_000_000)
        for rank, completions in enumerate(network.completions):
            if completions[0].error == "none":
                assert bits(tensors[rank]) == bits(expected)
            else:
                failures += 1
    assert failures > 0


def test_ranks_that_disagree_fail(form: str) -> None:
    """C26: other size, other type of equal size, other op: no rank returns mixed data."""
    cases = [
        (np.ones(2560, np.float32), DType.FLOAT32, OpCode.SUM),
        (np.ones(5120, np.float16), DType.FLOAT16, OpCode.SUM),
        (np.ones(5120, np.int32), DType.INT32, OpCode.SUM),
        (np.ones(5120, np.float32), DType.FLOAT32, OpCode.AVG),
    ]
    for other, dtype, op in cases:
        network = make_job(form, 2, straggler_timeout_us=1_000_000)
        mine = np.ones(5120, np.float32)
        network.workers[0].submit(mine, DType.FLOAT32, OpCode.SUM, 0)
        network.workers[1].submit(other, dtype, op, 0)
        network.kick(0)
        network.kick(1)
        assert network.run_all(1, 10_000_000)
        assert all(c[0].error != "none" for c in network.completions)


def test_a_failed_float_tensor_is_poisoned_and_later_operations_abort(form: str) -> None:
    tensors = random_tensors(np.random.default_rng(9), 2, 30_000, DType.FLOAT32)
    network = make_job(form, 2)
    submit_all(network, tensors, DType.FLOAT32)
    network.run(until=lambda: network.switch.counters["results"] > 30, limit_us=1_000_000)
    later = np.ones(10, np.float32)
    network.workers[0].submit(later, DType.FLOAT32, OpCode.SUM, network.now_us)
    network.workers[0].abort("rank 1 said so")
    network.kick(0)
    after = network.workers[0].submit(np.ones(10, np.float32), DType.FLOAT32, OpCode.SUM, network.now_us)
    network.kick(0)
    assert [(c.operation, c.error) for c in network.completions[0]] == [
        (0, "aborted"),
        (1, "aborted"),
        (after, "aborted"),
    ]
    assert np.isnan(tensors[0]).all()
    assert (later == 1).all()
    assert network.workers[0].poll(network.now_us) == []


def test_an_empty_operation_completes_at_once_and_keeps_the_ranks_in_step(form: str) -> None:
    """C16"""
    network = make_job(form, 2)
    empty = [np.empty(0, np.float32) for _ in range(2)]
    tensors = random_tensors(np.random.default_rng(10), 2, 700, DType.FLOAT32)
    expected = reference_allreduce(tensors, DType.FLOAT32)
    submit_all(network, empty, DType.FLOAT32)
    submit_all(network, tensors, DType.FLOAT32)
    submit_all(network, empty, DType.FLOAT32)
    assert network.run_all(3, 1_000_000)
    assert all(bits(t) == bits(expected) for t in tensors)


def test_one_worker(form: str) -> None:
    tensors = [np.linspace(-1, 1, 1000, dtype=np.float32)]
    expected = reference_allreduce(tensors, DType.FLOAT32)
    network = make_job(form, 1)
    submit_all(network, tensors, DType.FLOAT32)
    assert network.run_all(1, 1_000_000)
    assert bits(tensors[0]) == bits(expected)
