"""The daemon's memory stays flat."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

import netsum.host_agent as ha
from tests.e2e.switch_process import SwitchProcess

ALLREDUCES = 10_000
ALLOWED_GROWTH_KIB = 512  # pages touched for the first time; a leak of 100 bytes a packet would be 4 MB


def resident_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:"))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_daemon_does_not_grow_over_10_000_allreduces() -> None:
    with SwitchProcess() as switch:

        def run(rank: int) -> tuple[int, int]:
            with ha.connect(switch.control, job="memory", rank=rank, world_size=2) as agent:
                x = np.ones(2000, np.float32)
                before_kib = 0
                for ordinal in range(ALLREDUCES + 500):
                    if ordinal == 500:  # warm
                        before_kib = resident_kib(switch.process.pid)
                    agent.allreduce(x, op="avg", async_op=True).wait()
                assert agent.status().path == "switch"
                assert (x == 1).all()
                return before_kib, resident_kib(switch.process.pid)

        with ThreadPoolExecutor(2) as pool:
            (before_kib, after_kib), _ = pool.map(run, range(2))
        assert after_kib - before_kib < ALLOWED_GROWTH_KIB
