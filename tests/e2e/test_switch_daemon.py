"""`netsum switch` and `netsum status` as real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from netsum.protocol import control
from tests.e2e.control_agent import ControlAgent, start_job
from tests.e2e.switch_process import LOOPBACK, SwitchProcess, run_netsum

PYTHON = [*LOOPBACK, "--datapath", "python"]


def status_of(switch: SwitchProcess) -> dict[str, Any]:
    status: dict[str, Any] = json.loads(run_netsum("status", "--switch", switch.control, "--json").stdout)
    return status


def port_of(address: str) -> int:
    return int(address.rpartition(":")[2])


def test_the_ready_line_tells_the_real_addresses() -> None:
    with SwitchProcess(*PYTHON) as switch:
        ready = switch.ready
        assert ready["event"] == "ready"
        assert ready["pid"] == switch.process.pid
        assert ready["control"].startswith("tcp://127.0.0.1:")
        assert ready["data"].startswith("127.0.0.1:")
        assert port_of(ready["control"]) > 0
        assert port_of(ready["data"]) > 0
        assert ready["datapath"] == "python"
        assert ready["max_chunk_elems"] == 2048, "the MTU of the loopback interface carries them"
        socket.create_connection(("127.0.0.1", port_of(ready["control"])), timeout=5).close()


def test_a_job_and_its_status() -> None:
    arguments = (*LOOPBACK, "--lease", "60s")  # these agents send no heartbeats, and a busy machine takes its time
    with (
        SwitchProcess(*arguments) as switch,
        ControlAgent(switch.control, 0, 2) as a,
        ControlAgent(switch.control, 1, 2) as b,
    ):
        assert switch.ready["datapath"] == "native"
        start_job([a, b])
        a.contribute(5)
        deadline_s = time.monotonic() + 20
        while not (status := status_of(switch))["jobs"][0]["slots_in_use"]:  # the contribution may still be on its way
            assert time.monotonic() < deadline_s
            for agent in (a, b):
                agent.send(control.Heartbeat(agent.welcome.member, 1, 0))
        (job,) = status["jobs"]
        assert (job["job"], job["phase"], job["world_size"], job["results"]) == ("train", "running", 2, "unicast")
        assert (job["slots"], job["slots_in_use"], job["awaited_ranks"]) == (8, 1, [1])
        assert [m["rank"] for m in job["members"]] == [0, 1]
        assert job["members"][0]["data_address"] == f"127.0.0.1:{a.join.data_port}"
        assert job["members"][0]["pid"] == os.getpid()
        assert status["slots_taken"] == 8
        b.data.sendto(b"short", ("127.0.0.1", port_of(switch.data)))
        assert b.exchange(7) == 12
        assert a.result() == 12
        text = run_netsum("status", "--switch", switch.control).stdout
        for part in ("job 'train': running", "rank 1: 127.0.0.1", "results 1", "too_short 1", switch.data):
            assert part in text
        for agent in (a, b):
            agent.send(control.Leave(agent.welcome.member))
            agent.expect(control.Left)
        assert status_of(switch)["jobs"] == []


@pytest.mark.parametrize("what", ["control", "data"])
def test_a_port_in_use_names_its_holder(what: str) -> None:
    with SwitchProcess(*PYTHON) as switch:
        arguments = {"control": "tcp://127.0.0.1:0", "data": "127.0.0.1:0"} | {what: switch.ready[what]}
        for datapath in ("python", "native"):
            second = run_netsum(
                "switch", "--control", arguments["control"], "--data", arguments["data"], "--datapath", datapath
            )
            assert second.returncode == 1
            assert second.stdout == ""
            assert switch.ready[what] in second.stderr
            assert f"pid {switch.process.pid}" in second.stderr
            assert "Traceback" not in second.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("datapath", ["python", "native"])
def test_a_stop_leaves_nothing_behind(number: signal.Signals, datapath: str) -> None:
    with (
        SwitchProcess(*LOOPBACK, "--datapath", datapath) as switch,
        ControlAgent(switch.control, 0, 2) as a,
        ControlAgent(switch.control, 1, 2) as b,
    ):
        start_job([a, b])
        status, errors = switch.stop(number)
        assert status == 0, errors
        assert "Traceback" not in errors
        assert "being stopped" in a.expect(control.JobFailed).text
        assert "being stopped" in b.expect(control.JobFailed).text
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as data:
            data.bind(("127.0.0.1", port_of(switch.data)))
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port_of(switch.control)), timeout=5)


def test_a_restart_after_sigkill_takes_the_same_ports() -> None:
    with SwitchProcess() as first, ControlAgent(first.control, 0, 1) as agent:
        start_job([agent])
        status, _ = first.stop(signal.SIGKILL)
        assert status == -signal.SIGKILL
        with SwitchProcess("--control", first.control, "--data", first.data) as second:
            assert second.control == first.control
            assert second.data == first.data
            agent.send(control.Heartbeat(agent.welcome.member, 0, 0))
            assert agent.expect(control.Refused).code == "unknown_member"
            start_job([agent])
            assert agent.exchange(3) == 3


def test_two_switches_on_one_host() -> None:
    with SwitchProcess() as one, SwitchProcess() as two:
        assert one.control != two.control
        assert one.data != two.data
        with ControlAgent(one.control, 0, 1) as a, ControlAgent(two.control, 0, 1) as b:
            start_job([a, b])
            assert a.exchange(1) == 1
            assert b.exchange(2) == 2


def test_the_secret(tmp_path: Path) -> None:
    secret, wrong = tmp_path / "secret", tmp_path / "wrong"
    secret.write_text("open sesame\n")
    wrong.write_text("open barley\n")
    with SwitchProcess(*PYTHON, "--secret-file", str(secret)) as switch, ControlAgent(switch.control, 0, 1) as agent:
        agent.send(agent.join)
        nonce = agent.expect(control.Challenge).nonce
        fields = {name: getattr(agent.join, name) for name in agent.join.__struct_fields__}
        agent.join = control.Join(**fields | {"proof": control.join_proof("open sesame", nonce, agent.join)})
        start_job([agent])
        for extra, status in (([], 2), (["--secret-file", str(wrong)], 1), (["--secret-file", str(secret)], 0)):
            answer = run_netsum("status", "--switch", switch.control, *extra)
            assert answer.returncode == status, answer.stderr
            assert "sesame" not in answer.stderr


def test_status_without_a_switch() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        answer = run_netsum("status", "--switch", endpoint, "--timeout", "300ms")
    assert answer.returncode == 1
    assert endpoint in answer.stderr


@pytest.mark.parametrize(
    ("arguments", "status", "part"),
    [
        (["--slots", "1000"], 2, "power of two"),
        (["--datapath", "magic"], 2, "native, python"),
        (["--data", "0.0.0.0:0"], 2, "0.0.0.0"),
        (["--data", "192.0.2.77:0"], 1, "no interface"),
        (["--control", "127.0.0.1:48800"], 2, "tcp://"),
        (["--lease", "soon"], 2, "soon"),
        (["--secret-file", "/nonexistent"], 2, "/nonexistent"),
    ],
)
def test_wrong_settings_are_one_line(arguments: list[str], status: int, part: str) -> None:
    base = {"--control": "tcp://127.0.0.1:0", "--data": "127.0.0.1:0"} | {arguments[0]: arguments[1]}
    answer = run_netsum("switch", *(word for pair in base.items() for word in pair))
    assert answer.returncode == status, answer.stderr
    assert part in answer.stderr
    assert answer.stderr.count("\n") == 1


def test_help_has_examples_and_the_version_is_told() -> None:
    for command in ("switch", "status"):
        assert f"Example: netsum {command}" in run_netsum(command, "--help").stdout
    assert run_netsum("--version").stdout.startswith("netsum ")
