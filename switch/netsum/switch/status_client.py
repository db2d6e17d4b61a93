"""Asks a switch for its status over the control channel."""

from __future__ import annotations

import time
from typing import Any

import msgspec
import zmq

from netsum.protocol import control
from netsum.protocol.errors import JoinRefusedError, SwitchUnreachableError, UsageError
from netsum.switch.settings import parse_control_endpoint


def request_status(endpoint: str, secret: str | None = None, timeout_s: float = 2.0) -> dict[str, Any]:
    """The tree of :func:`netsum.switch.status.collect_status` from the switch at "tcp://host:port".

    Raises :class:`SwitchUnreachableError` when nothing answers in ``timeout_s``, :class:`JoinRefusedError` when the switch refuses,
    :class:`UsageError` when it wants a secret and there is none.
    """
    host, port = parse_control_endpoint(endpoint)
    context = zmq.Context(io_threads=1)
    try:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(f"tcp://{host}:{port}")
        return _ask(dealer, endpoint, secret, time.monotonic() + timeout_s, timeout_s)
    finally:
        context.destroy(linger=0)


def _ask(
    dealer: zmq.Socket[bytes], endpoint: str, secret: str | None, deadline_s: float, timeout_s: float
) -> dict[str, Any]:
    dealer.send(control.encode(control.StatusRequest()))
    while dealer.poll(max(0, int((deadline_s - time.monotonic()) * 1000))):
        try:
            message = control.decode_from_switch(dealer.recv_multipart()[-1])
        except msgspec.DecodeError as error:
            raise SwitchUnreachableError(f"what answers at {endpoint} is not a netsum switch: {error}") from error
        match message:
            case control.StatusReply(status=status):
                return status
            case control.Challenge(nonce=nonce):
                if secret is None:
                    raise UsageError(f"the switch at {endpoint} wants a secret; give the file that holds it")
                proof = control.status_proof(secret, nonce)
                dealer.send(control.encode(control.StatusRequest(proof)))
            case control.Refused(code=code, text=text):
                raise JoinRefusedError(f"the switch at {endpoint} refused: {text}", code)
    raise SwitchUnreachableError(
        f"no switch answered at {endpoint} within {timeout_s:g} s; is `netsum switch` running there?"
    )
