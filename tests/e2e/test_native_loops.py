"""Four native agents and a native switch on loopback: the bits of the reference, whatever the network does."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from netsum.native import NativeAgent, NativeSwitch
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.operation import Tensor
from netsum.protocol.reference import reference_allreduce
from netsum.protocol.wire import Header
from tests.unit.test_native_udp import free_group_port

WORLD_SIZE = 4
WAIT_US = 60_000_000


@contextlib.contextmanager
def running_job(
    *,
    multicast: bool,
    slots: int = 32,
    chunk_elems: int = 1024,
    job: int = 1,
    faults: dict[str, float] | None = None,
    timeout_us: int = 20_000_000,
    switch: NativeSwitch | None = None,
) -> Iterator[tuple[NativeSwitch, list[NativeAgent]]]:
    """A switch (or the one given) and a job of :data:`WORLD_SIZE` probed and started agents. ``slot_base`` is 64 times the job."""
    with contextlib.ExitStack() as stack:
        if switch is None:
            switch = NativeSwitch("127.0.0.1", 0)
            stack.callback(switch.close)
        agents = []
        for _ in range(WORLD_SIZE):
            agent = NativeAgent("127.0.0.1")
            stack.callback(agent.close)
            agents.append(agent)
        group = ("239.255.77.20", free_group_port()) if multicast else None
        switch.open_job(
            job_number=job,
            epoch=2,
            slot_base=64 * job,
            slots=slots,
            chunk_elems=chunk_elems,
            workers=[agent.address for agent in agents],
            multicast=group,
        )
        host, port = switch.address
        for rank, agent in enumerate(agents):
            if faults:
                agent.set_faults(seed=100 + rank, **faults)  # type: ignore[arg-type]
            assert agent.probe(
                switch_host=host,
                switch_port=port,
                multicast=group,
                job_number=job,
                chunk_elems=chunk_elems,
                timeout_us=5_000_000,
            ) == (True, multicast)
        switch.set_results(job, multicast)
        for rank, agent in enumerate(agents):
            agent.start(
                switch_host=host,
                switch_port=port,
                multicast=multicast,
                rank=rank,
                world_size=WORLD_SIZE,
                job_number=job,
                epoch=2,
                slot_base=64 * job,
                slots=slots,
                chunk_elems=chunk_elems,
                short_exponents=True,
                network_timeout_us=timeout_us,
                straggler_timeout_us=timeout_us,
            )
        yield switch, agents


def allreduce_all(
    agents: Sequence[NativeAgent], operations: Sequence[Sequence[Tensor]], dtype: DType, op: OpCode = OpCode.SUM
) -> None:
    """``operations[i][rank]`` is summed in place; all operations are in flight at once."""
    for tensors in operations:
        for agent, x in zip(agents, tensors, strict=True):
            agent.submit(x.ctypes.data, x.size, dtype, op)
    for agent in agents:
        for _ in operations:
            completion = agent.next_completion(WAIT_US)
            assert completion is not None
            assert completion[1] == "none", completion


def random_tensors(seed: int, numel: int, dtype: DType) -> list[Tensor]:
    rng = np.random.default_rng(seed)
    if dtype is DType.INT32:
        return [rng.integers(-(2**31), 2**31, numel, dtype=np.int32) for _ in range(WORLD_SIZE)]
    floats = [(rng.standard_normal(numel) * 2.0 ** rng.integers(-20, 20)).astype(np.float32) for _ in range(WORLD_SIZE)]
    if dtype is DType.FLOAT16:
        return [(x * 2.0**-20).astype(np.float16) for x in floats]
    return floats


@pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "unicast"])
@pytest.mark.parametrize("dtype", [DType.FLOAT32, DType.FLOAT16, DType.INT32])
def test_the_bits_of_the_reference(multicast: bool, dtype: DType) -> None:
    with running_job(multicast=multicast) as (switch, agents):
        operations = [random_tensors(i, numel, dtype) for i, numel in enumerate([1, 255, 100_003, 0, 256, 70_000])]
        expected = [reference_allreduce(tensors, dtype, OpCode.AVG) for tensors in operations]
        allreduce_all(agents, operations, dtype, OpCode.AVG)
        for tensors, want in zip(operations, expected, strict=True):
            for x in tensors:
                np.testing.assert_array_equal(x.view(np.uint8), want.view(np.uint8))
        assert switch.slots_in_use(1) == 0
        results = switch.counters()["results"]
        sent = switch.counters()["socket_datagrams_out"]
        assert results > 0
        if multicast:
            assert sent < 2 * results
        else:
            assert sent >= WORLD_SIZE * results


def test_non_finite_elements_reach_all_ranks() -> None:
    with running_job(multicast=True) as (_, agents):
        tensors = random_tensors(1, 50_000, DType.FLOAT32)
        tensors[0][[3, 40_000]] = np.inf
        tensors[1][40_000] = -np.inf
        tensors[2][9] = np.nan
        expected = reference_allreduce(tensors, DType.FLOAT32)
        allreduce_all(agents, [tensors], DType.FLOAT32)
        for x in tensors:
            np.testing.assert_array_equal(x.view(np.uint32), expected.view(np.uint32))


FAULTS = {
    "loss": {"loss": 0.02},
    "duplicates": {"duplicate": 0.05},
    "reordering": {"reorder": 0.05},
    "delay": {"delay_min_us": 100, "delay_max_us": 2000},
    "everything": {"loss": 0.01, "duplicate": 0.02, "reorder": 0.02, "delay_max_us": 500},
}


@pytest.mark.parametrize("multicast", [True, False], ids=["multicast", "unicast"])
@pytest.mark.parametrize("faults", FAULTS.values(), ids=FAULTS.keys())
def test_faults_do_not_change_a_bit(faults: dict[str, float], multicast: bool) -> None:
    with running_job(multicast=multicast, slots=16, faults=faults) as (switch, agents):
        operations = [random_tensors(i, 60_001, DType.FLOAT32) for i in range(5)]
        expected = [reference_allreduce(tensors, DType.FLOAT32) for tensors in operations]
        allreduce_all(agents, operations, DType.FLOAT32)
        for tensors, want in zip(operations, expected, strict=True):
            for x in tensors:
                np.testing.assert_array_equal(x.view(np.uint32), want.view(np.uint32))
        counters = [agent.counters() for agent in agents]
        injected = sum(n for c in counters for name, n in c.items() if name.startswith("fault_"))
        assert injected > 0
        resent = sum(c["fast_retransmits"] + c["timer_retransmits"] for c in counters)
        if "loss" in faults:
            assert resent > 0
            assert switch.counters()["replays"] > 0
        assert all(c["drop_wrong_source"] == 0 for c in counters)


def test_corruption_is_an_error_or_no_harm_but_never_a_wrong_sum() -> None:
    """A flipped bit behind the checksum: the operation fails, or the packet was dropped and resent."""
    with running_job(multicast=False, faults={"corrupt": 0.005}, timeout_us=3_000_000) as (_, agents):
        tensors = random_tensors(5, 100_003, DType.INT32)
        expected = reference_allreduce(tensors, DType.INT32)
        for agent, x in zip(agents, tensors, strict=True):
            agent.submit(x.ctypes.data, x.size, DType.INT32, OpCode.SUM)
        completions = [agent.next_completion(30_000_000) for agent in agents]
        assert sum(a.counters()["fault_in_corrupted"] + a.counters()["fault_out_corrupted"] for a in agents) > 0
        for completion, x in zip(completions, tensors, strict=True):
            assert completion is not None
            if completion[1] == "none":
                np.testing.assert_array_equal(x, expected)
            else:
                assert completion[1] in ("integrity", "overflow", "peers_missing", "switch_silent")


def test_two_jobs_share_a_switch_and_neither_disturbs_the_other() -> None:
    with (
        running_job(multicast=True, job=1) as (switch, first),
        running_job(multicast=False, job=2, slots=8, chunk_elems=64, switch=switch) as (_, second),
    ):
        a, b = random_tensors(1, 200_000, DType.FLOAT32), random_tensors(2, 10_000, DType.INT32)
        expected_a, expected_b = reference_allreduce(a, DType.FLOAT32), reference_allreduce(b, DType.INT32)
        for agents, tensors, dtype in ((first, a, DType.FLOAT32), (second, b, DType.INT32)):
            for agent, x in zip(agents, tensors, strict=True):
                agent.submit(x.ctypes.data, x.size, dtype, OpCode.SUM)
        for agent in [*first, *second]:
            completion = agent.next_completion(WAIT_US)
            assert completion is not None
            assert completion[1] == "none", completion
        for tensors, want in ((a, expected_a), (b, expected_b)):
            for x in tensors:
                np.testing.assert_array_equal(x.view(np.uint32), want.view(np.uint32))
        assert switch.job_counters(1)["results"] > 0
        assert switch.job_counters(2)["results"] > 0


def test_configuration_gets_its_turn_while_packets_flow() -> None:
    with running_job(multicast=True) as (switch, agents):
        operations = [random_tensors(i, 300_000, DType.FLOAT32) for i in range(4)]
        for tensors in operations:
            for agent, x in zip(agents, tensors, strict=True):
                agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)
        for number in range(10, 30):  # each waits for at most a batch
            switch.open_job(
                job_number=number,
                epoch=1,
                slot_base=4000 + 8 * number,
                slots=8,
                chunk_elems=256,
                workers=[("127.0.0.1", number)],
                multicast=None,
            )
            switch.close_job(number)
        for agent in agents:
            for _ in operations:
                completion = agent.next_completion(WAIT_US)
                assert completion is not None
                assert completion[1] == "none", completion


def test_any_datagram_from_anywhere_is_dropped_and_counted() -> None:
    """Random bytes, and packets of the job with random headers, go to the switch and to an agent while a tensor is summed."""
    rng = np.random.default_rng(11)
    with running_job(multicast=False) as (switch, agents), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        tensors = random_tensors(6, 500_000, DType.FLOAT32)
        expected = reference_allreduce(tensors, DType.FLOAT32)
        for agent, x in zip(agents, tensors, strict=True):
            agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)
        for i in range(300):
            junk = rng.bytes(int(rng.integers(0, 9000)))
            stranger.sendto(junk if i % 2 else b"\x15\x01\x02" + junk[3:], switch.address)
            stranger.sendto(junk, agents[0].address)
        for agent, x in zip(agents, tensors, strict=True):
            completion = agent.next_completion(WAIT_US)
            assert completion is not None
            assert completion[1] == "none", completion
            np.testing.assert_array_equal(x.view(np.uint32), expected.view(np.uint32))
        assert agents[0].counters()["drop_wrong_source"] > 0
        counters = switch.counters()
        assert sum(n for name, n in counters.items() if name.startswith("drop_")) > 0
        assert counters["internal_errors"] == 0


def test_a_worker_that_breaks_every_rule_does_not_stop_the_switch() -> None:
    """Mutated packets from a joined address: its own job may suffer, the switch and the other job do not."""
    rng = np.random.default_rng(12)
    with running_job(multicast=True) as (switch, agents), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as rogue:
        rogue.bind(("127.0.0.1", 0))
        switch.open_job(
            job_number=9,
            epoch=0,
            slot_base=2000,
            slots=4,
            chunk_elems=64,
            workers=[rogue.getsockname(), ("127.0.0.1", 9)],
            multicast=None,
        )
        for _ in range(2000):
            slot = 2000 + int(rng.integers(0, 5))
            number = int(rng.integers(0, 12))
            header = Header(
                int(rng.integers(0, 6)), int(rng.integers(0, 2)), 9, number, slot | int(rng.integers(2)) << 15
            )
            rogue.sendto(header.pack() + rng.bytes(int(rng.integers(0, 300))), switch.address)
        tensors = random_tensors(7, 100_000, DType.FLOAT32)
        expected = reference_allreduce(tensors, DType.FLOAT32)
        allreduce_all(agents, [tensors], DType.FLOAT32)
        for x in tensors:
            np.testing.assert_array_equal(x.view(np.uint32), expected.view(np.uint32))
        assert switch.job_counters(9)["contributions"] > 0
        assert switch.job_counters(9)["duplicates"] > 0
        assert switch.counters()["internal_errors"] == 0
