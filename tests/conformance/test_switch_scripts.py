"""Packet scripts for the switch: packets in, packets out. Built and read with the scapy layer, so that no codec tests itself."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from netsum.emulator.machines import Switch, make_switch
from netsum.protocol.scapy_layer import NetsumPacket, data_packet, elements_of
from netsum.protocol.switch_machine import Address, SwitchJobConfig
from tests.sim.jobs import FORMS, addresses

JOB, EPOCH, BASE, SLOTS = 3, 5, 16, 8
SIZE_CODES = {1: 64, 3: 256, 4: 512, 5: 1024, 6: 2048}
INT_MAX, INT_MIN = 2**31 - 1, -(2**31)


@dataclass
class Bench:
    """A switch with one job of ``world_size`` workers, and shorthands."""

    form: str
    world_size: int = 2
    size_code: int = 3
    switch: Switch = field(init=False)

    def __post_init__(self) -> None:
        self.switch = make_switch(self.form)
        self.workers = addresses(self.world_size)
        self.switch.open_job(SwitchJobConfig(JOB, EPOCH, BASE, SLOTS, SIZE_CODES[self.size_code], tuple(self.workers)))

    def packet(
        self, number: int, values: list[int], exponents: tuple[int, int] = (-128, 0), **other: int
    ) -> NetsumPacket:
        elems = SIZE_CODES[self.size_code]
        fields = {
            "job_number": JOB,
            "epoch": EPOCH,
            "number": number % 2**24,
            "version": number // SLOTS % 2,
            "slot": BASE + number % SLOTS,
        } | other
        pairs = list(exponents) * max(1, elems // 256)
        return data_packet(
            elements=values + [0] * (elems - len(values)), size_code=self.size_code, exponents=pairs, **fields
        )

    def send(self, rank: int, packet: NetsumPacket | bytes) -> list[tuple[str, NetsumPacket]]:
        outputs = self.switch.handle(bytes(packet), self.workers[rank])
        return [(o.kind, NetsumPacket(o.datagram)) for o in outputs]

    def drops(self) -> dict[str, int]:
        return {k.removeprefix("drop_"): v for k, v in self.switch.counters.items() if k.startswith("drop_") and v}


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("size_code", SIZE_CODES)
def test_last_contribution_brings_the_result(form: str, size_code: int) -> None:
    bench = Bench(form, world_size=3, size_code=size_code)
    assert bench.send(0, bench.packet(0, [1, -2], (-5, 0))) == []
    assert bench.send(2, bench.packet(0, [10, 20], (3, 0))) == []
    [(kind, result)] = bench.send(1, bench.packet(0, [100, 200], (-128, 1)))
    assert kind == "result"
    assert elements_of(result)[:3] == [111, 218, 0]
    assert result.exponents[:2] == [3, 1]
    assert (
        result.msg_type,
        result.size_code,
        result.job_number,
        result.epoch,
        result.number,
        result.slot,
        result.version,
    ) == (
        1,
        size_code,
        JOB,
        EPOCH,
        0,
        BASE,
        0,
    )
    assert len(bytes(result)) == len(bytes(bench.packet(0, [])))


def test_a_repeated_contribution_is_not_summed_twice(form: str) -> None:
    bench = Bench(form, world_size=3)
    bench.send(0, bench.packet(0, [1]))
    [(kind, pending)] = bench.send(0, bench.packet(0, [1]))
    assert (kind, pending.msg_type, pending.number) == ("answer", 2, 0)
    assert pending.missing == bytes([0b110])
    bench.send(1, bench.packet(0, [2]))
    [(_, result)] = bench.send(2, bench.packet(0, [4]))
    assert elements_of(result)[0] == 7
    [(kind, replay)] = bench.send(0, bench.packet(0, [1]))
    assert kind == "replay"
    assert bytes(replay) == bytes(result)
    assert bench.switch.counters["duplicates"] == 1
    assert bench.switch.counters["replays"] == 1


def test_the_other_version_is_summed_while_the_old_result_is_replayed(form: str) -> None:
    bench = Bench(form)
    bench.send(0, bench.packet(0, [1]))
    bench.send(1, bench.packet(0, [2]))
    bench.send(0, bench.packet(SLOTS, [10]))
    [(kind, replay)] = bench.send(1, bench.packet(0, [2]))  # lost its result
    assert (kind, elements_of(replay)[0]) == ("replay", 3)
    [(_, result)] = bench.send(1, bench.packet(SLOTS, [20]))
    assert elements_of(result)[0] == 30


def test_a_packet_delayed_for_two_rounds_is_stale(form: str) -> None:
    """The published one-bit version would sum it: its bit is clear in the version that it names."""
    bench = Bench(form)
    for number in (0, SLOTS):
        for rank in (0, 1):
            bench.send(rank, bench.packet(number, [1]))
    bench.send(0, bench.packet(2 * SLOTS, [100]))
    assert bench.send(1, bench.packet(0, [1])) == []
    assert bench.drops() == {"stale_number": 1}
    [(_, result)] = bench.send(1, bench.packet(2 * SLOTS, [200]))
    assert elements_of(result)[0] == 300


def test_a_claim_never_discards_an_incomplete_sum(form: str) -> None:
    bench = Bench(form)
    bench.send(0, bench.packet(0, [1]))
    assert bench.send(1, bench.packet(2 * SLOTS, [5])) == []
    assert bench.drops() == {"slot_busy": 1}
    [(_, result)] = bench.send(1, bench.packet(0, [2]))
    assert elements_of(result)[0] == 3


def test_sums_wrap_modulo_2_to_the_32(form: str) -> None:
    bench = Bench(form)
    bench.send(0, bench.packet(0, [INT_MAX, INT_MIN, INT_MIN, -1]))
    [(_, result)] = bench.send(1, bench.packet(0, [1, -1, INT_MIN, INT_MIN]))
    assert elements_of(result)[:4] == [INT_MIN, INT_MAX, 0, INT_MAX]


def test_exponents_are_signed_maxima(form: str) -> None:
    bench = Bench(form)
    bench.send(0, bench.packet(0, [0], (-127, 0)))
    [(_, result)] = bench.send(1, bench.packet(0, [0], (-128, 0)))
    assert result.exponents == [-127, 0]
    bench.send(0, bench.packet(1, [0], (127, 0)))
    [(_, result)] = bench.send(1, bench.packet(1, [0], (-1, 1)))
    assert result.exponents == [127, 1]


def test_exponents_only(form: str) -> None:
    bench = Bench(form, size_code=5)
    packet = NetsumPacket(
        msg_type=3,
        size_code=5,
        job_number=JOB,
        epoch=EPOCH,
        number=0,
        version=0,
        slot=BASE,
        exponents=[1, 0, 2, 0, 3, 0, 4, 1],
    )
    bench.send(0, packet)
    packet.exponents = [4, 0, 3, 0, 2, 1, 1, 0]
    [(kind, result)] = bench.send(1, packet)
    assert (kind, result.msg_type, result.exponents) == ("result", 3, [4, 0, 3, 0, 3, 1, 4, 1])
    assert len(bytes(result)) == 16
    assert bench.send(1, bench.packet(0, [1])) == []
    assert bench.drops() == {"kind_mismatch": 1}


def test_padding_is_not_payload(form: str) -> None:
    bench = Bench(form)
    bench.send(0, bytes(bench.packet(0, [1])) + b"\xff" * 18)
    [(_, result)] = bench.send(1, bytes(bench.packet(0, [2])) + b"\xff")
    assert elements_of(result)[0] == 3
    assert len(bytes(result)) == 1034


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"job_number": 4}, "wrong_job"),
        ({"epoch": 4}, "stale_epoch"),
        ({"slot": BASE + SLOTS}, "bad_slot"),
        ({"slot": BASE - 1}, "bad_slot"),
        ({"version": 1}, "bad_slot"),
        ({"slot": BASE + 1}, "bad_slot"),
        ({"msg_type": 0}, "bad_type"),
        ({"msg_type": 2}, "bad_type"),
        ({"size_code": 1}, "bad_size_code"),
        ({"size_code": 7}, "bad_size_code"),
    ],
)
def test_each_drop_has_its_reason(form: str, change: dict[str, int], reason: str) -> None:
    bench = Bench(form)
    datagram = bytearray(bytes(bench.packet(0, [9])))
    patched = NetsumPacket(bytes(datagram))
    for name, value in change.items():
        setattr(patched, name, value)
    datagram[:8] = bytes(patched)[:8]
    assert bench.send(0, bytes(datagram)) == []
    assert bench.drops() == {reason: 1}
    bench.send(0, bench.packet(0, [1]))
    [(_, result)] = bench.send(1, bench.packet(0, [2]))
    assert elements_of(result)[0] == 3


def test_short_datagrams_and_strangers(form: str) -> None:
    bench = Bench(form)
    good = bytes(bench.packet(0, [9]))
    for length in (0, 1, 7):
        assert bench.send(0, good[:length]) == []
    for length in (8, 10, 1033):
        assert bench.send(0, good[:length]) == []
    assert bench.switch.handle(good, Address(0x0A000001, 4001)) == []
    assert bench.drops() == {"too_short": 3, "bad_length": 3, "unknown_source": 1}


def test_probe_is_answered_at_full_size(form: str) -> None:
    bench = Bench(form)
    probe = NetsumPacket(msg_type=5, size_code=3, job_number=JOB, epoch=1, number=2, slot=0)
    assert bench.send(0, bytes(probe)) == []
    [(kind, answer)] = bench.send(0, bytes(probe) + bytes(1026))
    assert (kind, answer.msg_type, answer.epoch, answer.number, answer.slot) == ("answer", 5, 1, 2, 1)
    assert bench.drops() == {"bad_length": 1}


def test_a_closed_job_is_unknown_and_its_number_free(form: str) -> None:
    bench = Bench(form)
    bench.send(0, bench.packet(0, [9]))
    bench.switch.close_job(JOB)
    assert bench.send(1, bench.packet(0, [9])) == []
    assert bench.drops() == {"unknown_source": 1}
    bench.switch.open_job(SwitchJobConfig(JOB, EPOCH + 1, BASE, SLOTS, 256, tuple(bench.workers)))
    assert bench.send(1, bench.packet(0, [9])) == []
    assert bench.drops()["stale_epoch"] == 1
    bench.send(0, bench.packet(0, [1], epoch=EPOCH + 1))
    [(_, result)] = bench.send(1, bench.packet(0, [2], epoch=EPOCH + 1))
    assert elements_of(result)[0] == 3


def test_a_job_that_breaks_the_rules_is_refused(form: str) -> None:
    switch = make_switch(form)
    where = tuple(addresses(2))
    for job in (
        SwitchJobConfig(0, 0, 0, 6, 256, where),
        SwitchJobConfig(0, 0, 0, 8, 300, where),
        SwitchJobConfig(0, 0, 32764, 8, 256, where),
        SwitchJobConfig(0, 0, 0, 8, 256, (where[0], where[0])),
        SwitchJobConfig(0, 0, 0, 8, 256, ()),
    ):
        with pytest.raises(ValueError, match=r".+"):
            switch.open_job(job)
    switch.open_job(SwitchJobConfig(0, 0, 0, 8, 256, where))
    with pytest.raises(ValueError, match=r".+"):
        switch.open_job(SwitchJobConfig(1, 0, 8, 8, 256, where))
    with pytest.raises(ValueError, match=r".+"):
        switch.open_job(SwitchJobConfig(0, 0, 8, 8, 256, tuple(addresses(4)[2:])))
