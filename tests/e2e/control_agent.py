"""The smallest agent for tests of the switch: the control channel on a DEALER, the data path on a UDP socket, every wait bounded."""

from __future__ import annotations

import os
import socket
import time
from types import TracebackType
from typing import TypeVar

import numpy as np
import zmq

from netsum.protocol import control
from netsum.protocol.wire import Header, MsgType, data_bytes, exponents_bytes

Kind = TypeVar("Kind", bound=control.Message)
WAIT_S = 10.0


class ControlAgent:
    """One worker. Its data socket is bound to loopback."""

    def __init__(self, endpoint: str, rank: int, world_size: int, job: str = "train", run_id: str = "run") -> None:
        self.context = zmq.Context()
        self.dealer = self.context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.LINGER, 0)
        self.dealer.connect(endpoint)
        self.data = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self.data.bind(("127.0.0.1", 0))
        self.data.settimeout(WAIT_S)
        self.welcome: control.Welcome | None = None
        host, port = self.data.getsockname()
        self.join = control.Join(
            control.PROTOCOL_VERSION, "test", job, run_id, rank, world_size, host, port, 256, 8, "here", os.getpid()
        )

    def send(self, message: control.AgentMessage) -> None:
        self.dealer.send(control.encode(message))

    def expect(self, kind: type[Kind], wait_s: float = WAIT_S) -> Kind:
        """The next message of ``kind``; Waiting and heartbeat replies before it are passed over, others fail."""
        deadline_s = time.monotonic() + wait_s
        while self.dealer.poll(max(0, int((deadline_s - time.monotonic()) * 1000))):
            message = control.decode_from_switch(self.dealer.recv())
            if isinstance(message, kind):
                return message
            assert isinstance(message, control.Waiting | control.HeartbeatReply), message
        raise AssertionError(f"no {kind.__name__} within {wait_s:g} s")

    def expect_welcome(self) -> control.Welcome:
        self.welcome = self.expect(control.Welcome)
        return self.welcome

    def exchange(self, value: int) -> int:
        """Contributes a packet full of ``value`` as number 0; returns what the first element of the result is."""
        self.contribute(value)
        return self.result()

    def contribute(self, value: int) -> None:
        assert self.welcome is not None
        welcome = self.welcome
        header = Header(MsgType.DATA, 3, welcome.job_number, welcome.epoch << 24, welcome.slot_base)
        payload = np.full(256, value, ">i4").tobytes()
        datagram = header.pack() + bytes(exponents_bytes(256) - 8) + payload
        assert len(datagram) == data_bytes(256)
        self.data.sendto(datagram, (welcome.data_host, welcome.data_port))

    def result(self) -> int:
        datagram = self.data.recv(65536)
        return int(np.frombuffer(datagram[exponents_bytes(256) :], ">i4")[0])

    def close(self) -> None:
        self.context.destroy(linger=0)
        self.data.close()

    def __enter__(self) -> ControlAgent:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def start_job(agents: list[ControlAgent], multicast_ok: bool = False) -> None:
    """Join, ready, started."""
    for agent in agents:
        agent.send(agent.join)
    for agent in agents:
        agent.send(control.Ready(agent.expect_welcome().member, True, multicast_ok, ""))
    for agent in agents:
        agent.expect(control.Started)
