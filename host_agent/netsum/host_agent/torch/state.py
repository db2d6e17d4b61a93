"""The hook's state: an agent, and the process groups of our own that it needs."""

from __future__ import annotations

import atexit
import contextlib
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from netsum.host_agent.agent import Agent, connect
from netsum.host_agent.settings import Settings
from netsum.host_agent.status import AgentStatus
from netsum.host_agent.torch.group import OwnGroup, arrange_meeting
from netsum.host_agent.torch.registration import check_model
from netsum.protocol.errors import UsageError


class HookState:
    """Connects a rank to the switch, and holds the connection for :data:`allreduce_hook`.

    Collective: every rank of ``process_group`` constructs it, after ``init_process_group``. A pickled state holds the arguments only:
    no socket, no process group, no secret. After loading it connects when it is registered, or by :meth:`connect`; where the group is
    not the default one, set :attr:`process_group` first.

    Args:
        switch: control address, "tcp://host:port"; default: NETSUM_SWITCH in the environment.
        process_group: the group that the DDP model uses; default: the default group.
        required: raise rather than fall back to a ring between the ranks when no switch answers.
        job: name of the job at the switch; default: a unique one, chosen by rank 0.
        rendezvous: "host:port" where rank 0 listens for its peers; default: NETSUM_RENDEZVOUS, else chosen by rank 0.
        secret: the job's secret; default: NETSUM_SECRET.
        timeout_s: bound for each allreduce and for meeting the peers.

    Raises:
        UsageError: torch.distributed is not initialised, or this rank is not in ``process_group``.
        NetsumError: what :func:`netsum.host_agent.connect` raises.
    """

    def __init__(
        self,
        switch: str | None = None,
        process_group: dist.ProcessGroup | None = None,
        *,
        required: bool = False,
        job: str | None = None,
        rendezvous: str | None = None,
        secret: str | None = None,
        timeout_s: float = 30.0,
    ) -> None:
        self.process_group = process_group
        self._arguments: dict[str, Any] = {
            "switch": switch,
            "required": required,
            "job": job,
            "rendezvous": rendezvous,
            "timeout_s": timeout_s,
        }
        self._secret = secret
        self._closed = False
        self._agent: Agent | None = None
        self._peers: OwnGroup | None = None
        self._sparse: OwnGroup | None = None
        self.connect()

    def connect(self) -> None:
        """Meets the other ranks and joins the switch; does nothing while connected. Collective."""
        if self._agent is not None:
            return
        if self._closed:
            raise UsageError("this HookState is closed; construct a new one on all ranks")
        settings = Settings.from_environment()
        arguments = self._arguments
        timeout_s = arguments["timeout_s"]
        try:
            self._peers = OwnGroup(self.process_group, timeout_s)
            # Sparse gradients are reduced on DDP's thread, the ring runs on the agent's: a group for each.
            self._sparse = OwnGroup(self.process_group, timeout_s)
            meeting = arrange_meeting(self._peers, arguments["job"], arguments["rendezvous"] or settings.rendezvous)
            self._agent = connect(
                arguments["switch"] or settings.switch or None,
                job=meeting.job,
                rank=self._peers.rank,
                world_size=self._peers.world_size,
                rendezvous=meeting.rendezvous,
                required=arguments["required"],
                secret=self._secret,
                timeout_s=timeout_s,
                peer_group=self._peers,
            )
        except BaseException:
            self._release()
            raise
        _open_states.add(self)

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Checks that this state fits ``ddp``, before any step is made. Raises :class:`UsageError` naming what does not fit."""
        check_model(ddp.module)
        self.connect()
        assert self._peers is not None
        ranks = dist.get_process_group_ranks(ddp.process_group)
        if ranks != self._peers.ranks:
            raise UsageError(
                f"the model's process group has the ranks {ranks}, HookState's has {self._peers.ranks}: "
                "pass HookState the same process_group as DistributedDataParallel"
            )

    @property
    def agent(self) -> Agent:
        """The agent; raises :class:`UsageError` when closed."""
        if self._agent is None:
            raise UsageError(
                "this HookState is closed, or loaded from a file and not connected: call its connect() on all ranks"
            )
        return self._agent

    def average_sparse(self, tensor: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """The average of a sparse tensor over the ranks, by gloo: exact, past the switch."""
        if self._sparse is None:
            raise UsageError("this HookState is closed")
        return self._sparse.average_sparse(tensor)

    def status(self) -> AgentStatus:
        """The path in use, why, and counters."""
        return self.agent.status()

    def close(self) -> None:
        """Leaves the switch. Runs by itself at the end of the process; safe to call twice, and after destroy_process_group()."""
        _open_states.discard(self)
        self._closed = True
        self._release()

    def _release(self) -> None:
        agent, self._agent = self._agent, None
        groups, self._peers, self._sparse = (self._peers, self._sparse), None, None
        if agent is not None:
            agent.close()
        for group in groups:
            if group is not None:
                group.close()

    def __getstate__(self) -> dict[str, Any]:
        return dict(self._arguments)

    def __setstate__(self, arguments: dict[str, Any]) -> None:
        self.process_group = None
        self._arguments = dict(arguments)
        self._secret = None
        self._closed = False
        self._agent = None
        self._peers = None
        self._sparse = None


_open_states: weakref.WeakSet[HookState] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for state in list(_open_states):
        with contextlib.suppress(Exception):  # the interpreter is going down: nobody could act on it
            state.close()
