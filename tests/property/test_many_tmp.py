"""The C++ machines are the Python machines: the same runs, datagram for datagram, counter for counter."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from netsum.emulator.faults import LinkFaults
from netsum.emulator.machines import make_switch
from netsum.emulator.virtual_network import VirtualNetwork
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.switch_machine import Address, SwitchJobConfig
from tests.sim.jobs import addresses, make_job, random_tensors

faults = st.builds(
    LinkFaults,
    loss=st.sampled_from([0.0, 0.02, 0.2]),
    duplicate=st.sampled_from([0.0, 0.2]),
    corrupt=st.sampled_from([0.0, 0.0, 0.02]),
    delay_us=st.sampled_from([(20, 40), (20, 3000)]),
    late_share=st.sampled_from([0.0, 0.05]),
)
operations = st.lists(
    st.tuples(
        st.integers(0, 6000),
        st.sampled_from(list(DType)),
        st.sampled_from(list(OpCode)),
        st.sampled_from(["none", "none", "nan", "inf"]),
    ),
    min_size=1,
    max_size=5,
)


def run(
    form: str, plan: list[tuple[int, DType, OpCode, str]], seed: int, **job: object
) -> tuple[VirtualNetwork, list[np.ndarray]]:
    network = make_job(form, **job, seed=seed)  # type: ignore[arg-type]
    rng = np.random.default_rng(seed)
    world_size = len(network.workers)
    everything = []
    for ordinal, (numel, dtype, op, special) in enumerate(plan):
        tensors = random_tensors(rng, world_size, numel, dtype)
        for rank, x in enumerate(tensors):
            if special != "none" and x.size and dtype in (DType.FLOAT32, DType.FLOAT16):
                x[rng.integers(0, x.size, 1 + x.size // 100)] = getattr(np, special)
            everything.append(x)
            start_us = int(rng.integers(0, 3000)) + 2000 * ordinal

            def submit(rank: int = rank, x: np.ndarray = x, dtype: DType = dtype, op: OpCode = op) -> None:
                network.workers[rank].submit(x, dtype, op, network.now_us)
                network.kick(rank)

            network.at(start_us, submit)
    network.run_all(len(plan), 12_000_000)
    return network, everything


@settings(max_examples=1200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    plan=operations,
    seed=st.integers(0, 2**32 - 1),
    world_size=st.integers(1, 5),
    slots=st.sampled_from([4, 8, 32]),
    chunk_elems=st.sampled_from([64, 256, 512, 1024, 2048]),
    up=faults,
    down=faults,
    short_exponents=st.booleans(),
    first_number=st.sampled_from([0, 2**24 - 64]),
)
def test_same_trace(
    plan: list[tuple[int, DType, OpCode, str]],
    seed: int,
    world_size: int,
    slots: int,
    chunk_elems: int,
    up: LinkFaults,
    down: LinkFaults,
    short_exponents: bool,
    first_number: int,
) -> None:
    job = {
        "world_size": world_size,
        "slots": slots,
        "chunk_elems": chunk_elems,
        "up": up,
        "down": down,
        "short_exponents": short_exponents,
        "first_number": first_number,
        "straggler_timeout_us": 4_000_000,
    }
    python, python_tensors = run("python", plan, seed, **job)
    native, native_tensors = run("native", plan, seed, **job)
    for ours, theirs in zip(python.trace, native.trace, strict=False):
        assert ours == theirs
    assert len(python.trace) == len(native.trace)
    assert python.now_us == native.now_us
    assert [[(c.operation, c.error, tuple(c.missing_ranks)) for c in rank] for rank in python.completions] == [
        [(c.operation, c.error, tuple(c.missing_ranks)) for c in rank] for rank in native.completions
    ]
    assert [w.counters for w in python.workers] == [w.counters for w in native.workers]
    assert python.switch.counters == native.switch.counters
    for ours, theirs in zip(python_tensors, native_tensors, strict=True):
        np.testing.assert_array_equal(ours.view(np.uint8), theirs.view(np.uint8))


@settings(max_examples=3000, deadline=None)
@given(data=st.data())
def test_switches_agree_on_any_datagram(data: st.DataObject) -> None:
    """Malformed, foreign and stale datagrams: the same answer and the same counters."""
    python, native = make_switch("python"), make_switch("native")
    where = (*addresses(2), Address(0x0A0000FF, 9))
    for switch in (python, native):
        switch.open_job(SwitchJobConfig(3, 5, 16, 4, 64, tuple(where[:2])))
    for _ in range(data.draw(st.integers(1, 30))):
        header = bytes(
            [
                data.draw(st.sampled_from([0x11, 0x31, 0x51, 0x21, 0x13, 0x00])),
                data.draw(st.sampled_from([3, 3, 3, 4])),
                data.draw(st.sampled_from([5, 5, 5, 6])),
                0,
                0,
            ]
        )
        number = data.draw(st.integers(0, 20))
        pool = (0x8000 if number // 4 % 2 else 0) | (16 + number % 4)
        if data.draw(st.integers(0, 9)) == 0:
            pool = data.draw(st.integers(0, 0xFFFF))
        body = data.draw(st.binary(min_size=2, max_size=2)) + bytes(data.draw(st.sampled_from([256, 256, 0, 10, 300])))
        datagram = header + bytes([number]) + pool.to_bytes(2, "big") + body
        if data.draw(st.integers(0, 9)) == 0:
            datagram = datagram[: data.draw(st.integers(0, 10))]
        source = data.draw(st.sampled_from(where))
        assert python.handle(datagram, source) == native.handle(datagram, source)
    assert python.counters == native.counters
    assert python.slots_in_use(3) == native.slots_in_use(3)
    assert list(python.awaited_ranks(3)) == list(native.awaited_ranks(3))
