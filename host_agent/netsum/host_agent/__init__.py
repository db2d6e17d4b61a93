"""The worker's side: connect to the peers and the switch, reduce tensors. The core needs no torch.

import netsum.host_agent as ha

with ha.connect("tcp://127.0.0.1:48800", job="train", rank=r, world_size=n) as agent:
    work = agent.allreduce(array, op="sum", async_op=True)
    work.wait()
    print(agent.status())
"""

from netsum.host_agent.agent import Agent, connect
from netsum.host_agent.peer_group import PeerGroup
from netsum.host_agent.status import AgentStatus
from netsum.host_agent.work import Work

__all__ = ["Agent", "AgentStatus", "PeerGroup", "Work", "connect"]
