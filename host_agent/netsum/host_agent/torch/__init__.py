"""netsum under PyTorch's DistributedDataParallel. The only package of netsum that imports torch.

from netsum.host_agent.torch import HookState, allreduce_hook

ddp_model.register_comm_hook(HookState(switch="tcp://10.0.0.1:48800"), allreduce_hook)
"""

from __future__ import annotations

from netsum.host_agent.torch.hook import allreduce_hook
from netsum.host_agent.torch.state import HookState

__all__ = ["HookState", "allreduce_hook"]
