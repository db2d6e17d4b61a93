"""The switch inside this process, over real sockets: what agents, strangers and broken connections do to it."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator

import pytest
import zmq

from netsum.protocol import control
from netsum.protocol.job_settings import JobTableSettings
from netsum.switch.server import SwitchServer
from netsum.switch.settings import SwitchSettings
from netsum.switch.status_client import request_status
from tests.e2e.control_agent import ControlAgent, start_job


def settings(datapath: str, **jobs: int) -> SwitchSettings:
    return SwitchSettings("tcp://127.0.0.1:0", "127.0.0.1:0", datapath, JobTableSettings(**jobs))


@pytest.fixture(params=["python", "native"])
def server(request: pytest.FixtureRequest) -> Iterator[SwitchServer]:
    quick = {"lease_us": 600_000, "heartbeat_interval_us": 100_000, "waiting_interval_us": 100_000}
    with SwitchServer(settings(request.param, **quick)) as opened:
        yield opened
    assert opened.failure is None


def wait_until(condition: Callable[[], bool], wait_s: float = 10.0) -> None:
    deadline_s = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < deadline_s, "waited in vain"
        time.sleep(0.02)


def test_results_by_unicast(server: SwitchServer) -> None:
    agents = [ControlAgent(server.control_endpoint, rank, 3) for rank in range(3)]
    start_job(agents)
    for rank, agent in enumerate(agents):
        agent.contribute(10**rank)
    assert [agent.result() for agent in agents] == [111, 111, 111]
    for agent in agents:
        agent.close()


def test_results_by_multicast(server: SwitchServer) -> None:
    """One datagram to the group; the members' own sockets get nothing."""
    with ControlAgent(server.control_endpoint, 0, 1) as agent:
        agent.send(agent.join)
        welcome = agent.expect_welcome()
        group = (welcome.multicast_host, welcome.multicast_port)
        assert welcome.multicast_host.startswith("239.")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
            ear.bind(group)
            membership = socket.inet_aton(group[0]) + socket.inet_aton("127.0.0.1")
            ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, membership)
            ear.settimeout(5)
            agent.send(control.Ready(welcome.member, True, True, ""))
            assert agent.expect(control.Started).results == "multicast"
            agent.contribute(9)
            assert ear.recv(65536)[:1] == bytes([1 << 4 | 3])
        agent.data.settimeout(0.1)
        with pytest.raises(TimeoutError):
            agent.result()


def test_a_silent_job_loses_its_lease(server: SwitchServer) -> None:
    with ControlAgent(server.control_endpoint, 0, 2) as a, ControlAgent(server.control_endpoint, 1, 2) as b:
        start_job([a, b])
        deadline_s = time.monotonic() + 10
        while time.monotonic() < deadline_s:
            a.send(control.Heartbeat(a.welcome.member, 0, 0))
            if a.dealer.poll(100):
                message = control.decode_from_switch(a.dealer.recv())
                if isinstance(message, control.JobFailed):
                    break
        assert "rank 1 at" in message.text
        assert "sent no heartbeat for 0." in message.text
        assert request_status(server.control_endpoint)["slots_taken"] == 0
        a.data.settimeout(0.2)
        a.contribute(1)
        with pytest.raises(TimeoutError):
            a.result()
        wait_until(lambda: request_status(server.control_endpoint)["datapath"]["drops"].get("unknown_source", 0) == 1)


def test_a_worker_that_dies_while_joining_makes_place(server: SwitchServer) -> None:
    with ControlAgent(server.control_endpoint, 1, 2) as waiting:
        waiting.send(waiting.join)
        dying = ControlAgent(server.control_endpoint, 0, 3, job="other")
        dying.send(dying.join)
        dying.expect(control.Waiting)
        dying.close()
        wait_until(lambda: len(request_status(server.control_endpoint)["jobs"]) == 1)
        waiting.expect(control.Waiting)


def test_two_workers_with_one_rank_over_the_wire(server: SwitchServer) -> None:
    with ControlAgent(server.control_endpoint, 0, 2) as right, ControlAgent(server.control_endpoint, 0, 2) as wrong:
        right.send(right.join)
        right.expect(control.Waiting)
        wrong.send(wrong.join)
        refused = wrong.expect(control.Refused)
        assert refused.code == "duplicate_rank"
        for agent in (right, wrong):
            assert f"127.0.0.1:{agent.join.data_port}" in refused.text
        notes: list[str] = []
        wait_until(lambda: bool(notes.extend(right.expect(control.Waiting).notes) or notes))
        assert refused.text in notes


@pytest.mark.parametrize("frames", [[b""], [b"\xff" * 10], [b"\x80"], [b"", b"x"], [control.encode(control.Left())]])
def test_strange_messages_are_refused_and_counted(server: SwitchServer, frames: list[bytes]) -> None:
    with ControlAgent(server.control_endpoint, 0, 1) as agent:
        agent.dealer.send_multipart(frames)
        assert agent.expect(control.Refused).code == "malformed"
        assert request_status(server.control_endpoint)["control_counters"]["refused_malformed"] == 1
        start_job([agent])


def test_strangers_on_the_control_port(server: SwitchServer) -> None:
    """A browser, and a message larger than any of ours."""
    host, _, port = server.control_endpoint.removeprefix("tcp://").rpartition(":")
    with socket.create_connection((host, int(port)), timeout=5) as browser:
        browser.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        context = zmq.Context()
        huge = context.socket(zmq.DEALER)
        huge.connect(server.control_endpoint)
        huge.send(bytes(control.MAX_CONTROL_MESSAGE_BYTES + 1))
        with ControlAgent(server.control_endpoint, 0, 1) as agent:
            start_job([agent])
            assert agent.exchange(4) == 4
        context.destroy(linger=0)


def test_close_is_quick_and_may_be_repeated() -> None:
    opened = SwitchServer(settings("python"))
    opened.start()
    began_s = time.monotonic()
    opened.close()
    opened.close()
    assert time.monotonic() - began_s < 2
    assert opened.stopped.is_set()
