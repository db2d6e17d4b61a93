"""The native packet loops on real loopback sockets: what Python sees of them."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from netsum.native import NativeAgent, NativeSwitch
from netsum.protocol.dtypes import DType, OpCode
from netsum.protocol.wire import Header, data_bytes

JOB, EPOCH, SLOTS, CHUNK_ELEMS = 3, 7, 8, 256
GROUP = "239.255.77.10"
WAIT_US = 5_000_000


@pytest.fixture
def switch() -> Iterator[NativeSwitch]:
    with_port_zero = NativeSwitch("127.0.0.1", 0)
    yield with_port_zero
    with_port_zero.close()


@pytest.fixture
def agent() -> Iterator[NativeAgent]:
    one = NativeAgent("127.0.0.1")
    yield one
    one.close()


def free_group_port() -> int:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def open_job(
    switch: NativeSwitch, workers: list[tuple[str, int]], *, multicast: tuple[str, int] | None = None, job: int = JOB
) -> None:
    switch.open_job(
        job_number=job,
        epoch=EPOCH,
        slot_base=0,
        slots=SLOTS,
        chunk_elems=CHUNK_ELEMS,
        workers=workers,
        multicast=multicast,
    )


def start(agent: NativeAgent, switch_address: tuple[str, int], *, world_size: int = 1, **other: int) -> None:
    settings = {"network_timeout_us": WAIT_US, "straggler_timeout_us": WAIT_US} | other
    agent.start(
        switch_host=switch_address[0],
        switch_port=switch_address[1],
        multicast=False,
        rank=0,
        world_size=world_size,
        job_number=JOB,
        epoch=EPOCH,
        slot_base=0,
        slots=SLOTS,
        chunk_elems=CHUNK_ELEMS,
        short_exponents=True,
        **settings,
    )


def probe(
    agent: NativeAgent, address: tuple[str, int], *, multicast: tuple[str, int] | None = None, timeout_us: int = WAIT_US
) -> tuple[bool, bool]:
    return agent.probe(
        switch_host=address[0],
        switch_port=address[1],
        multicast=multicast,
        job_number=JOB,
        chunk_elems=CHUNK_ELEMS,
        timeout_us=timeout_us,
    )


def contribution(*, number: int = 0, epoch: int = EPOCH, job: int = JOB, size_code: int = 3, slot: int = 0) -> bytes:
    header = Header(msg_type=1, size_code=size_code, job_number=job, tsi=epoch << 24 | number, pool_index=slot)
    return header.pack() + bytes(data_bytes(CHUNK_ELEMS) - 8)


def wait_for(counter: str, value: int, switch: NativeSwitch) -> int:
    deadline = time.monotonic() + 5
    while (seen := switch.counters()[counter]) < value and time.monotonic() < deadline:
        time.sleep(0.005)
    return seen


def drops(counters: dict[str, int]) -> dict[str, int]:
    return {name.removeprefix("drop_"): n for name, n in counters.items() if name.startswith("drop_") and n}


def test_port_zero_takes_a_free_port_and_a_taken_one_is_named(switch: NativeSwitch) -> None:
    host, port = switch.address
    assert host == "127.0.0.1"
    assert port > 0
    assert switch.receive_buffer_granted_bytes > 0
    with pytest.raises(OSError, match=f"127.0.0.1:{port}.*bind") as caught:
        NativeSwitch(host, port)
    assert caught.value.errno == errno.EADDRINUSE


def test_a_host_name_is_refused() -> None:
    with pytest.raises(ValueError, match="'localhost' is not an IPv4 address"):
        NativeSwitch("localhost", 0)


def test_malformed_and_foreign_datagrams_are_counted_by_reason(switch: NativeSwitch) -> None:
    with (
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as worker,
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger,
    ):
        worker.bind(("127.0.0.1", 0))
        other = ("127.0.0.1", 9)  # never speaks, so no slot completes
        open_job(switch, [worker.getsockname(), other])
        bad = {
            b"": "too_short",
            b"1234567": "too_short",
            b"\xf3" + contribution()[1:]: "bad_type",
            contribution(job=JOB + 1): "wrong_job",
            contribution(size_code=4): "bad_size_code",
            contribution()[:-1]: "bad_length",
            contribution(epoch=EPOCH - 1): "stale_epoch",
            contribution(slot=SLOTS): "bad_slot",
            contribution(number=1): "bad_slot",
        }
        for datagram in bad:
            worker.sendto(datagram, switch.address)
        stranger.sendto(contribution(), switch.address)
        worker.sendto(bytes(60000), switch.address)
        assert wait_for("packets_in", len(bad) + 2, switch) == len(bad) + 2
        expected = {"unknown_source": 1}
        for reason in [*bad.values(), "bad_type"]:
            expected[reason] = expected.get(reason, 0) + 1
        assert drops(switch.counters()) == expected
        assert switch.slots_in_use(JOB) == 0

        worker.sendto(contribution() + b"padding", switch.address)
        assert wait_for("contributions", 1, switch) == 1
        assert switch.slots_in_use(JOB) == 1
        assert switch.awaited_ranks(JOB) == [1]
        assert switch.job_counters(JOB)["contributions"] == 1
        # A repeated contribution is answered: rank 1 is missing.
        worker.settimeout(5)
        worker.sendto(contribution(), switch.address)
        assert worker.recv(100) == Header(2, 3, JOB, EPOCH << 24, 0).pack() + b"\x02"


def test_jobs_open_and_close(switch: NativeSwitch) -> None:
    workers = [("127.0.0.1", 1001), ("127.0.0.1", 1002)]
    open_job(switch, workers)
    with pytest.raises(ValueError, match=r"."):
        open_job(switch, workers)
    with pytest.raises(ValueError, match="no multicast group"):
        switch.set_results(JOB, True)
    with pytest.raises(ValueError, match="not a multicast group"):
        open_job(switch, [("127.0.0.1", 1003)], multicast=("127.0.0.1", 5), job=JOB + 1)
    switch.close_job(JOB)
    switch.close_job(JOB)
    open_job(switch, workers)


def test_close_is_idempotent_quick_and_final(switch: NativeSwitch) -> None:
    started = time.monotonic()
    switch.close()
    switch.close()
    assert time.monotonic() - started < 2
    assert switch.counters()["packets_in"] == 0
    with pytest.raises(RuntimeError, match="is closed"):
        open_job(switch, [])


def test_probe_by_unicast_and_multicast(switch: NativeSwitch, agent: NativeAgent) -> None:
    group = (GROUP, free_group_port())
    open_job(switch, [agent.address], multicast=group)
    assert probe(agent, switch.address, multicast=group) == (True, True)
    assert probe(agent, switch.address) == (True, False)


def test_probe_that_nobody_answers_ends_in_time(switch: NativeSwitch, agent: NativeAgent) -> None:
    started = time.monotonic()
    assert probe(agent, switch.address, timeout_us=250_000) == (False, False)
    assert 0.24 < time.monotonic() - started < 2
    assert agent.counters()["socket_datagrams_out"] == 3
    assert drops(switch.counters()) == {"unknown_source": 3}


def test_probe_with_a_group_that_carries_nothing(switch: NativeSwitch, agent: NativeAgent) -> None:
    open_job(switch, [agent.address])
    answers = probe(agent, switch.address, multicast=(GROUP, free_group_port()), timeout_us=150_000)
    assert answers == (True, False)


def test_path_mtu_and_address(agent: NativeAgent) -> None:
    assert agent.address[0] == "127.0.0.1"
    assert agent.path_mtu("127.0.0.1", 9) >= 1500
    with pytest.raises(ValueError, match="not an IPv4 address"):
        agent.path_mtu("nowhere", 9)


def test_an_agent_used_in_the_wrong_order(switch: NativeSwitch, agent: NativeAgent) -> None:
    with pytest.raises(RuntimeError, match="after start"):
        agent.submit(0, 0, DType.FLOAT32, OpCode.SUM)
    with pytest.raises(ValueError, match="loss"):
        agent.set_faults(seed=1, loss=2.0)
    assert agent.next_completion(1000) is None
    start(agent, switch.address)
    with pytest.raises(RuntimeError, match="set_faults comes before"):
        agent.set_faults(seed=1)
    with pytest.raises(RuntimeError, match="start comes before"):
        start(agent, switch.address)
    with pytest.raises(ValueError, match="dtype code"):
        agent.submit(0, 0, 9, OpCode.SUM)
    with pytest.raises(ValueError, match="op code"):
        agent.submit(0, 0, DType.FLOAT32, 3)


def test_results_from_elsewhere_are_not_taken(switch: NativeSwitch, agent: NativeAgent) -> None:
    start(agent, switch.address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.sendto(contribution(), agent.address)
        deadline = time.monotonic() + 5
        while agent.counters()["drop_wrong_source"] < 1 and time.monotonic() < deadline:
            time.sleep(0.005)
    assert agent.counters()["drop_wrong_source"] == 1
    assert agent.counters()["packets_in"] == 0


def test_a_silent_switch_is_an_error_and_the_agent_is_done(agent: NativeAgent) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as deaf:
        deaf.bind(("127.0.0.1", 0))
        start(agent, deaf.getsockname(), world_size=2, network_timeout_us=200_000)
        x = np.ones(1000, np.float32)
        operation = agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)
        completion = agent.next_completion(WAIT_US)
        assert completion is not None
        assert completion[:2] == (operation, "switch_silent")
        later = agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)
        completion = agent.next_completion(WAIT_US)
        assert completion is not None
        assert completion[:2] == (later, "aborted")


def test_a_missing_peer_is_named(switch: NativeSwitch, agent: NativeAgent) -> None:
    open_job(switch, [agent.address, ("127.0.0.1", 9)])
    start(agent, switch.address, world_size=2, straggler_timeout_us=400_000)
    x = np.ones(1000, np.float32)
    agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)
    completion = agent.next_completion(WAIT_US)
    assert completion is not None
    assert completion[1:3] == ("peers_missing", [1])
    assert agent.counters()["pendings"] > 0


@pytest.mark.parametrize("end", ["abort", "close"])
def test_abort_and_close_fail_what_is_unfinished_and_wake_the_waiter(
    switch: NativeSwitch, agent: NativeAgent, end: str
) -> None:
    open_job(switch, [agent.address, ("127.0.0.1", 9)])
    start(agent, switch.address, world_size=2)
    x = np.ones(1000, np.float32)
    operation = agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)
    seen: list[tuple[int, str, list[int], str] | None] = []
    waiter = threading.Thread(target=lambda: seen.append(agent.next_completion(60_000_000)))
    waiter.start()
    time.sleep(0.1)
    if end == "abort":
        agent.abort("rank 1 said so")
    else:
        agent.close()
        agent.close()
    waiter.join(timeout=5)
    assert not waiter.is_alive()
    assert seen[0] is not None
    assert seen[0][:2] == (operation, "aborted")
    if end == "close":
        assert agent.next_completion(60_000_000) is None
        with pytest.raises(RuntimeError, match="before close"):
            agent.submit(x.ctypes.data, x.size, DType.FLOAT32, OpCode.SUM)


def test_close_wakes_a_waiter_with_nothing_submitted(switch: NativeSwitch, agent: NativeAgent) -> None:
    start(agent, switch.address)
    seen: list[object] = []
    waiter = threading.Thread(target=lambda: seen.append(agent.next_completion(60_000_000)))
    waiter.start()
    time.sleep(0.05)
    agent.close()
    waiter.join(timeout=5)
    assert seen == [None]
