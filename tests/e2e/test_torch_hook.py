"""The DDP hook against DDP without it, on real processes (cases of CASES.md by number)."""

from __future__ import annotations

import http.server
import socket
import threading
from collections.abc import Iterator

import pytest

pytest.importorskip("torch")

from tests.e2e.switch_process import SwitchProcess
from tests.e2e.torch_pool import TorchPool

pytestmark = [pytest.mark.torch, pytest.mark.timeout(180)]


def closed_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"tcp://127.0.0.1:{port}"


@pytest.fixture(scope="module", params=["switch", "ring"])
def path(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    """(path expected, NETSUM_SWITCH): a switch, or a port where nothing listens."""
    if request.param == "ring":
        yield "ring", closed_port()
        return
    with SwitchProcess() as switch:
        yield "switch", switch.control


@pytest.fixture(scope="module")
def pair(path: tuple[str, str]) -> Iterator[TorchPool]:
    pool = TorchPool(2, {"NETSUM_SWITCH": path[1], "NETSUM_CONNECT_TIMEOUT_S": "1"})
    yield pool
    assert pool.close() == [0, 0]


@pytest.fixture(scope="module")
def trio(path: tuple[str, str]) -> Iterator[TorchPool]:
    pool = TorchPool(3, {"NETSUM_SWITCH": path[1], "NETSUM_CONNECT_TIMEOUT_S": "1"})
    yield pool
    assert pool.close() == [0, 0, 0]


def test_path(pair: TorchPool, path: tuple[str, str]) -> None:
    statuses = pair.run("status")
    assert [status["path"] for status in statuses] == [path[0]] * 2
    assert all(path[1].removeprefix("tcp://") in status["reason"] for status in statuses)


@pytest.mark.parametrize("bucket_view", [False, True])
def test_c12_the_average_is_divided_once(trio: TorchPool, bucket_view: bool) -> None:
    assert trio.run("c12_divide_once", bucket_view=bucket_view) == [2.0] * 3


def test_c12_subgroups(trio: TorchPool) -> None:
    assert trio.run("c12_subgroup", members=[1, 2]) == [None, 2.5, 2.5]
    assert trio.run("c12_subgroup", members=[1]) == [None, 2.0, None]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_c13_half_precision_models(pair: TorchPool, dtype: str) -> None:
    pair.run("c13_half", dtype=dtype)


def test_c15_float64_stays_float64(trio: TorchPool) -> None:
    assert trio.run("c15_float64") == pytest.approx([1e-12] * 3, abs=1e-15)


@pytest.mark.parametrize(
    "case",
    [
        "mixed_dtypes_and_complex",
        "c16_empty_parameter",
        "c17_channels_last",
        "c19_sparse",
        "c20_unused_parameters",
        "c24_join",
        "wrapped_hook",
    ],
)
def test_like_ddp_without_the_hook(pair: TorchPool, case: str) -> None:
    pair.run(case)


def test_c20_unused_parameters_without_search_raise_as_usual(pair: TorchPool) -> None:
    for text in pair.run("c20_unused_without_search"):
        assert "Expected to have finished reduction in the prior iteration" in text


@pytest.mark.parametrize("bucket_view", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_c21_no_sync(pair: TorchPool, bucket_view: bool, set_to_none: bool) -> None:
    pair.run("c21_no_sync", bucket_view=bucket_view, set_to_none=set_to_none)


def test_c23_rebuilt_buckets(pair: TorchPool) -> None:
    for (operations,) in pair.run("c23_rebuilt_buckets"):
        assert operations > 5  # more than one bucket a step


def test_c10_an_overflow_on_one_rank_skips_the_step_on_all(pair: TorchPool) -> None:
    for without, with_hook in pair.run("c10_grad_scaler"):
        assert with_hook == without == [65536.0] * 3 + [32768.0] * 3


def test_c28_a_pickled_state_reconnects(pair: TorchPool) -> None:
    assert pair.run("c28_pickled_state") == [True, True]


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        ("complex32", ["UnsupportedError", "scale (dtype complex32)", "Supported are float32"]),
        ("wrong state", ["UsageError", "HookState", "NoneType"]),
        ("twice", ["RuntimeError"]),
        ("other group", ["UsageError", "[0, 1]", "process_group"]),
        ("required", ["SwitchUnreachableError", "127.0.0.1:1"]),
    ],
)
def test_refused_with_a_reason(pair: TorchPool, attempt: str, says: list[str]) -> None:
    for text in pair.run("error_of", attempt=attempt):
        for word in says:
            assert word in text


@pytest.mark.parametrize("kind", ["raise", "close"])
def test_c27_a_failure_in_the_hook_ends_backward_on_all_ranks(trio: TorchPool, kind: str) -> None:
    texts = trio.run("c27_failure", kind=kind, at_rank=1)
    assert ("the user's own hook failed" if kind == "raise" else "closed") in texts[1]
    for text in (texts[0], texts[2]):
        assert "rank 1" in text


def test_c24_without_join_the_longer_rank_gets_an_error_that_names_the_other(pair: TorchPool) -> None:
    short, long = pair.run("c24_without_join")
    assert short == ""
    assert "rank 0" in long


def test_c28_a_resumed_run_has_the_bits_of_the_straight_one(pair: TorchPool) -> None:
    for straight, resumed in pair.run("c28_resume"):
        assert straight == resumed


@pytest.mark.parametrize("listener", ["nobody", "http"])
def test_c30_without_a_switch_one_warning_and_the_ring(pair: TorchPool, listener: str) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"tcp://127.0.0.1:{server.server_address[1]}" if listener == "http" else closed_port()
        answers = pair.run("c30_no_switch", switch=address)
        server.shutdown()
    for path, seconds, warnings in answers:
        assert path == "ring"
        assert seconds < 6  # the connect timeout is 1 s; building two gloo groups on a busy machine is the rest
        assert len(warnings) == 1
        assert address.removeprefix("tcp://") in warnings[0]
        assert "ring" in warnings[0]


def test_a_closed_state_says_so_and_does_not_reconnect_behind_the_users_back(pair: TorchPool) -> None:
    for texts in pair.run("use_after_close"):
        assert all("closed" in text for text in texts)
