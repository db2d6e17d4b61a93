"""What the worker processes of :mod:`tests.e2e.torch_pool` run: training with the hook beside the same training without it."""

from __future__ import annotations

import hashlib
import io
import itertools
import logging
import pickle
import time
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel

from netsum.host_agent.torch import HookState, allreduce_hook
from netsum.protocol.errors import UsageError

_states: list[HookState] = []


def state() -> HookState:
    """The process's HookState over all ranks; the switch, if any, is in the environment."""
    if not _states:
        _states.append(HookState(timeout_s=20))
    return _states[0]


def close_states() -> None:
    while _states:
        _states.pop().close()


def status() -> dict[str, Any]:
    now = state().status()
    return {"path": now.path, "reason": now.reason, "counters": now.counters, "failure": now.failure}


# -- helpers -----------------------------------------------------------------------------------------------------------


def rank() -> int:
    return dist.get_rank()


def with_hook(module: nn.Module, hook_state: HookState | None = None, **options: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallel(module, **options)
    ddp.register_comm_hook(hook_state or state(), allreduce_hook)
    return ddp


def gradients(module: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def digest(module: nn.Module) -> str:
    return hashlib.sha256(
        b"".join(p.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes() for p in module.parameters())
    ).hexdigest()


def same_on_all_ranks(value: Any) -> bool:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return all(other == value for other in values)


def assert_close(got: list[torch.Tensor | None], expected: list[torch.Tensor | None]) -> None:
    """Within the bound of CASES.md for float32, the largest value of all gradients standing for that of a block."""
    n = dist.get_world_size()
    assert [g is None for g in got] == [e is None for e in expected]
    pairs = [(g, e) for g, e in zip(got, expected, strict=True) if g is not None and e is not None]
    largest = max((float(e.abs().max()) for _, e in pairs if e.numel()), default=0.0)
    for g, e in pairs:
        bound = 4 * n * n * 2**-31 * largest * n + 2**-21 * e.double().abs()
        excess = (g.double() - e.double()).abs() - bound
        assert g.shape == e.shape
        assert g.stride() == e.stride()
        assert not e.numel() or float(excess.max()) <= 0, (
            f"beyond the bound by {float(excess.max())}, largest value {largest}"
        )


def compare_with_ddp(
    make: Callable[[], nn.Module], inputs: Callable[[int], torch.Tensor], steps: int, **options: Any
) -> tuple[nn.Module, nn.Module]:
    """Trains twice on the same inputs (``inputs(step)`` of this rank), with and without the hook; compares at every step."""
    pair = []
    for hooked in (False, True):
        torch.manual_seed(7)
        module = make()
        pair.append((module, with_hook(module, **options) if hooked else DistributedDataParallel(module, **options)))
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.01) for _, ddp in pair]
    for step in range(steps):
        for (_, ddp), optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad()
            ddp(inputs(step)).square().mean().backward()
        assert_close(gradients(pair[1][0]), gradients(pair[0][0]))
        for optimizer in optimizers:
            optimizer.step()
        # the next step starts from equal parameters, so that the gradients are comparable again
        with torch.no_grad():
            assert same_on_all_ranks(digest(pair[1][0])), f"step {step}: the ranks' parameters differ"
            for mine, reference in zip(pair[1][0].parameters(), pair[0][0].parameters(), strict=True):
                mine.copy_(reference)
    return pair[1][0], pair[0][0]


def random_inputs(*shape: int) -> Callable[[int], torch.Tensor]:
    return lambda step: torch.randn(*shape, generator=torch.Generator().manual_seed(1000 * step + rank()))


# -- cases (numbers of CASES.md) -----------------------------------------------------------------------------------------


def c12_divide_once(bucket_view: bool) -> float:
    module = nn.ParameterList([nn.Parameter(torch.zeros(4))])
    return float(_one_step(module, state(), float(rank() + 1), gradient_as_bucket_view=bucket_view)[0])


def c12_subgroup(members: list[int]) -> float | None:
    group = dist.new_group(members)
    if rank() not in members:
        return None
    assert isinstance(group, dist.ProcessGroup)
    hook_state = HookState(process_group=group, timeout_s=20)
    gradient = _one_step(
        nn.ParameterList([nn.Parameter(torch.zeros(4))]), hook_state, float(rank() + 1), process_group=group
    )
    hook_state.close()
    return float(gradient[0])


class _Sum(nn.Module):
    def __init__(self, inner: nn.ParameterList) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, factor: float) -> torch.Tensor:
        return sum((p.sum() * factor for p in self.inner), torch.zeros(()))


def _one_step(parameters: nn.ParameterList, hook_state: HookState, factor: float, **options: Any) -> torch.Tensor:
    ddp = with_hook(_Sum(parameters), hook_state, **options)
    ddp(factor).backward()
    gradient = parameters[0].grad
    assert gradient is not None
    return gradient


def c13_half(dtype: str) -> None:
    kind = getattr(torch, dtype)

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    torch.manual_seed(7)
    module = make().to(kind)
    reference = make()
    for mine, other in zip(reference.parameters(), module.parameters(), strict=True):
        mine.data = other.detach().float()
    ddp, plain = with_hook(module), DistributedDataParallel(reference)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
    inputs = random_inputs(16, 64)
    for step in range(5):
        optimizer.zero_grad()
        ddp(inputs(step).to(kind)).square().mean().backward()
        if step == 0:
            plain(inputs(step).to(kind).float()).square().mean().backward()
            epsilon = torch.finfo(kind).eps
            for got, want in zip(gradients(module), gradients(reference), strict=True):
                assert got is not None
                assert want is not None
                assert got.dtype == kind
                assert float((got.float() - want).abs().max()) <= 8 * epsilon * float(want.abs().max())
        optimizer.step()
        assert same_on_all_ranks(digest(module))


def c15_float64() -> float:
    module = nn.ParameterList([nn.Parameter(torch.zeros(4, dtype=torch.float64))])
    return float(_one_step(module, state(), 1 + rank() * 1e-12)[0]) - 1.0


def mixed_dtypes_and_complex() -> None:
    kinds = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.complex64]
    parameters = nn.ParameterList([nn.Parameter(torch.zeros(300, dtype=kind)) for kind in kinds])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = parameters

        def forward(self, factor: float) -> torch.Tensor:
            return sum((torch.view_as_real(p) if p.is_complex() else p).double().sum() * factor for p in self.parts)

    ddp = with_hook(Model())
    ddp(float(rank() + 1)).backward()
    mean = (dist.get_world_size() + 1) / 2
    for parameter in parameters:
        assert parameter.grad is not None
        values = torch.view_as_real(parameter.grad) if parameter.is_complex() else parameter.grad
        assert values.double().eq(mean).all(), (parameter.dtype, values)


def c16_empty_parameter() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.empty = nn.Parameter(torch.empty(0, 5))
            self.linear = nn.Linear(5, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cat([self.linear(x).flatten(), self.empty.flatten()])

    compare_with_ddp(Model, random_inputs(4, 5), 3)
    # a bucket of nothing but empty parameters
    _one_step(nn.ParameterList([nn.Parameter(torch.empty(0, 5))]), state(), 1.0)


def c17_channels_last() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.Sequential(nn.Conv2d(64, 64, 1), nn.Conv2d(64, 64, 7, groups=64))
            self.convolutions.to(memory_format=torch.channels_last)
            self.transposed = nn.Parameter(torch.randn(6, 64).t())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.convolutions(x).mean((2, 3)) @ self.transposed

    inputs = random_inputs(2, 64, 8, 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare_with_ddp(Model, lambda step: inputs(step).to(memory_format=torch.channels_last), 3)
    assert not [w for w in caught if "netsum" in str(w.filename)]


def c19_sparse() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(1000, 16, sparse=True)
            self.linear = nn.Linear(16, 2)

        def forward(self, indices: torch.Tensor) -> torch.Tensor:
            return self.linear(self.embedding(indices).mean(0))

    pair = []
    for hooked in (False, True):
        torch.manual_seed(7)
        module = Model()
        pair.append((module, with_hook(module) if hooked else DistributedDataParallel(module)))
    for step in range(3):
        indices = torch.arange(10) + 100 * rank() + 10 * step
        for _, ddp in pair:
            ddp.zero_grad()
            ddp(indices).square().sum().backward()
        (hooked_model, _), (plain, _) = pair[1], pair[0]
        got, want = hooked_model.embedding.weight.grad, plain.embedding.weight.grad
        assert got is not None
        assert want is not None
        assert got.is_sparse
        assert_close([got.to_dense(), hooked_model.linear.weight.grad], [want.to_dense(), plain.linear.weight.grad])


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})
        self.used = "a"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.branches[self.used](x)


def c20_unused_parameters() -> None:
    class Alternating(_Branches):
        def __init__(self) -> None:
            super().__init__()
            self.step = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.used = "ab"[(self.step + rank()) % 2]
            self.step += 1
            return super().forward(x)

    mine, _ = compare_with_ddp(Alternating, random_inputs(3, 4), 6, find_unused_parameters=True)
    assert isinstance(mine, Alternating)
    assert mine.branches["c"].weight.grad is None


def c20_unused_without_search() -> str:
    ddp = with_hook(_Branches())
    ddp(torch.ones(2, 4)).sum().backward()
    try:
        ddp(torch.ones(2, 4)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def c21_no_sync(bucket_view: bool, set_to_none: bool) -> None:
    pair = []
    for hooked in (False, True):
        torch.manual_seed(7)
        module = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        options = {"gradient_as_bucket_view": bucket_view}
        pair.append((module, with_hook(module, **options) if hooked else DistributedDataParallel(module, **options)))
    optimizers = [torch.optim.SGD(ddp.parameters(), lr=0.05) for _, ddp in pair]
    inputs = random_inputs(4, 8)
    for step in range(6):
        for (_, ddp), optimizer in zip(pair, optimizers, strict=True):
            optimizer.zero_grad(set_to_none=set_to_none)
            started = state().status().operations_started
            for micro_batch in range(3):
                with ddp.no_sync():
                    ddp(inputs(10 * step + micro_batch)).square().mean().backward()
            assert state().status().operations_started == started
            ddp(inputs(10 * step + 3)).square().mean().backward()
            optimizer.step()
        for mine, other in zip(pair[1][0].parameters(), pair[0][0].parameters(), strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
        assert same_on_all_ranks(digest(pair[1][0]))


def c23_rebuilt_buckets() -> list[int]:
    widths = [8, 24, 16, 40, 12, 64, 20, 48, 28, 36, 56, 32, 8]

    class Reversed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(a, b) for a, b in itertools.pairwise(widths)][::-1])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in reversed(self.layers):
                x = layer(x)
            return x

    before = state().status().operations_completed
    compare_with_ddp(Reversed, random_inputs(4, 8), 5, bucket_cap_mb=0.02)
    return [state().status().operations_completed - before]


def c24_join() -> None:
    results = []
    for hooked in (False, True):
        torch.manual_seed(7)
        module = nn.Linear(8, 4)
        ddp = with_hook(module) if hooked else DistributedDataParallel(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        with Join([ddp]):
            for step in range(5 + 3 * rank()):
                optimizer.zero_grad()
                ddp(random_inputs(4, 8)(step)).square().mean().backward()
                optimizer.step()
        results.append(module)
    for mine, other in zip(results[1].parameters(), results[0].parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)
    assert same_on_all_ranks(digest(results[1]))


def c10_grad_scaler() -> list[list[float]]:
    runs = []
    for hooked in (False, True):
        torch.manual_seed(7)
        module = nn.Linear(8, 8)
        ddp = with_hook(module) if hooked else DistributedDataParallel(module)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)
        scales = []
        for step in range(6):
            optimizer.zero_grad()
            x = random_inputs(4, 8)(step) * (1e38 if step == 3 and rank() == 1 else 1.0)
            scaler.scale(ddp(x).mean()).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            assert same_on_all_ranks(digest(module)), f"step {step}"
        runs.append(scales)
    return runs


def c28_pickled_state() -> bool:
    data = pickle.dumps(state())
    close_states()
    loaded = pickle.loads(data)
    with pytest.raises(UsageError, match="connect"):
        loaded.status()
    _states.append(loaded)
    compare_with_ddp(lambda: nn.Linear(8, 4), random_inputs(4, 8), 2)
    return bool(loaded.status().operations_completed)


def c24_without_join() -> str:
    """Rank 0 makes two steps, the others three. Returns the error of the third."""
    ddp = with_hook(nn.Linear(8, 4), hook_state := HookState(timeout_s=4))
    started, text = time.monotonic(), ""
    try:
        for step in range(2 + min(rank(), 1)):
            ddp(random_inputs(4, 8)(step)).square().mean().backward()
    except Exception as error:
        text = str(error)
    hook_state.close()
    assert time.monotonic() - started < 12
    return text


def c28_resume() -> list[str]:
    """Parameters after 4 steps, and after 2 steps, saving everything, and 2 more from what was saved."""

    def train(ddp: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            ddp(random_inputs(4, 8)(step)).square().mean().backward()
            optimizer.step()

    digests = []
    torch.use_deterministic_algorithms(True)
    for stop in (4, 2):
        torch.manual_seed(7)
        module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
        train(with_hook(module), optimizer, range(stop))
        if stop == 2:
            saved = io.BytesIO()
            torch.save([module.state_dict(), optimizer.state_dict(), state()], saved)
            saved.seek(0)
            module = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
            optimizer = torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
            parameters, momenta, loaded = torch.load(saved, weights_only=False)
            module.load_state_dict(parameters)
            optimizer.load_state_dict(momenta)
            train(with_hook(module, loaded), optimizer, range(2, 4))
            loaded.close()
        digests.append(digest(module))
    torch.use_deterministic_algorithms(False)
    return digests


def c30_no_switch(switch: str) -> tuple[str, float, list[str]]:
    """Path, seconds to connect, and the warnings of this rank."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("netsum").addHandler(handler)
    started = time.monotonic()
    hook_state = HookState(switch, timeout_s=20)
    seconds = time.monotonic() - started
    ddp = with_hook(nn.Linear(8, 4), hook_state)
    for _ in range(2):
        ddp(torch.ones(1, 8)).sum().backward()
    logging.getLogger("netsum").removeHandler(handler)
    path = hook_state.status().path
    hook_state.close()
    return path, seconds, warned


def error_of(attempt: str) -> str:
    """The text of the error of one of the attempts below, which are refused at registration."""
    attempts: dict[str, Callable[[], object]] = {
        "complex32": lambda: with_hook(_WithComplexHalf(), init_sync=False),
        "wrong state": lambda: DistributedDataParallel(nn.Linear(2, 2)).register_comm_hook(None, allreduce_hook),
        "twice": lambda: with_hook(nn.Linear(2, 2)).register_comm_hook(state(), allreduce_hook),
        "other group": _register_on_other_group,
        "required": lambda: HookState("tcp://127.0.0.1:1", required=True, timeout_s=10),
    }
    started = time.monotonic()
    try:
        attempts[attempt]()
    except Exception as error:
        return f"{type(error).__name__} after {time.monotonic() - started:.0f} s: {error}"
    return ""


class _WithComplexHalf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.zeros(16, dtype=torch.complex32))


def _register_on_other_group() -> None:
    group = dist.new_group([rank()], use_local_synchronization=True)
    with_hook(nn.Linear(2, 2), process_group=group)


def wrapped_hook() -> None:
    """The hook inside another hook: what DDP's compressing wrappers do."""
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_wrapper

    ddp = DistributedDataParallel(nn.Linear(8, 4))
    ddp.register_comm_hook(state(), fp16_compress_wrapper(allreduce_hook))
    ddp(torch.full((1, 8), float(rank()))).sum().backward()
    assert ddp.module.weight.grad.eq((dist.get_world_size() - 1) / 2).all()


def c27_failure(kind: str, at_rank: int) -> str:
    """Two steps; in the second, ``at_rank`` fails. Returns the error that backward() raised."""

    def hook(hook_state, bucket):  # type: ignore[no-untyped-def]  # DDP takes no annotations that are strings
        if calls["armed"] and rank() == at_rank:
            if kind == "raise":
                raise ValueError("the user's own hook failed")
            hook_state.agent.close()
        return allreduce_hook(hook_state, bucket)

    calls = {"armed": False}
    ddp = DistributedDataParallel(nn.Linear(8, 4))
    hook_state = HookState(timeout_s=4)
    ddp.register_comm_hook(hook_state, hook)
    ddp(torch.ones(1, 8)).sum().backward()
    calls["armed"] = True
    text = ""
    started = time.monotonic()
    try:
        ddp(torch.ones(1, 8)).sum().backward()
    except Exception as error:
        text = f"{type(error).__name__}: {error}"
    hook_state.close()
    assert time.monotonic() - started < 15
    return text


def use_after_close() -> list[str]:
    """The errors of registering, of a step and of status() with a closed state."""
    hook_state = HookState(timeout_s=20)
    ddp = with_hook(nn.Linear(2, 2), hook_state)
    hook_state.close()
    hook_state.close()
    texts = []
    attempts: list[Callable[[], object]] = [
        lambda: with_hook(nn.Linear(2, 2), hook_state),
        lambda: ddp(torch.ones(1, 2)).sum().backward(),
        hook_state.status,
    ]
    for attempt in attempts:
        with pytest.raises(UsageError) as caught:
            attempt()
        texts.append(str(caught.value))
    return texts
