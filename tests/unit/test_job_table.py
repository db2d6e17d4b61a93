"""Scripts for the control plane's machine: who says what, when, and what everybody is told."""

from __future__ import annotations

import pytest

from netsum.protocol import control
from netsum.protocol.errors import UsageError
from netsum.protocol.job_actions import DatapathFeatures
from netsum.protocol.job_settings import JobTableSettings
from tests.job_table_driver import SECOND_US, Driver, join

A0 = "rank 0 at 127.0.0.1:4000 (host host0, pid 100)"


def beating(members: dict[bytes, str], *without: bytes) -> tuple[tuple[bytes, str], ...]:
    return tuple(item for item in members.items() if item[0] not in without)


# -- the way of a job --------------------------------------------------------------------------------------------------


def test_a_job_from_join_to_leave() -> None:
    driver = Driver()
    driver.send(b"w1", join(1))
    assert driver.last(b"w1", control.Waiting) == control.Waiting([0], [])
    driver.send(b"w0", join(0))
    welcome = driver.last(b"w0", control.Welcome)
    other = driver.last(b"w1", control.Welcome)
    assert (welcome.slot_base, welcome.slots, welcome.chunk_elems) == (0, 128, 2048)
    assert (welcome.data_host, welcome.data_port) == ("127.0.0.1", 48864)
    assert (welcome.multicast_host, welcome.multicast_port) == (f"239.1.2.{welcome.job_number}", 50000)
    assert len(welcome.member) == 32
    assert welcome.member != other.member
    opened = driver.open_jobs[welcome.job_number]
    assert opened.workers == (("127.0.0.1", 4000), ("127.0.0.1", 4001))
    assert opened.epoch == welcome.epoch

    driver.send(b"w0", control.Ready(welcome.member, True, True, ""))
    assert driver.take(b"w0") == []
    driver.send(b"w1", control.Ready(other.member, True, True, ""))
    assert driver.last(b"w0", control.Started).results == "multicast"
    assert driver.last(b"w1", control.Started).results == "multicast"
    assert driver.results == {welcome.job_number: True}

    driver.send(b"w0", control.Heartbeat(welcome.member, 3, 2))
    assert driver.last(b"w0", control.HeartbeatReply) == control.HeartbeatReply([], [welcome.job_number])
    assert driver.table.status(driver.now_us)["jobs"][0]["members"][0]["operations_started"] == 3

    driver.send(b"w0", control.Leave(welcome.member))
    assert driver.last(b"w0", control.Left)
    assert driver.open_jobs, "the other rank still runs"
    driver.send(b"w1", control.Leave(other.member))
    assert driver.last(b"w1", control.Left)
    assert not driver.open_jobs
    assert driver.table.status(driver.now_us)["slots_taken"] == 0
    assert driver.table.next_deadline_us is None


def test_one_worker_is_a_job() -> None:
    driver = Driver()
    assert driver.start_all(1)


def test_joins_may_be_repeated() -> None:
    driver = Driver()
    for _ in range(3):
        driver.send(b"w0", join(0))
    assert len(driver.take(b"w0")) == 3
    driver.send(b"w1", join(1))
    token = driver.last(b"w0", control.Welcome).member
    driver.send(b"again", join(0))
    assert driver.last(b"again", control.Welcome).member == token, "a new connection of the same worker"
    assert len(driver.opened) == 1
    driver.send(b"again", control.Ready(token, True, True, ""))
    driver.send(b"w1", control.Ready(driver.last(b"w1", control.Welcome).member, True, True, ""))
    assert driver.last(b"again", control.Started), "replies go where the member was heard last"
    driver.send(b"again", control.Ready(token, True, True, ""))
    assert driver.last(b"again", control.Started)


def test_who_waits_is_told_every_second_who_is_missing() -> None:
    driver = Driver()
    driver.send(b"w1", join(1, 4))
    driver.take(b"w1")
    driver.advance(3 * SECOND_US)
    assert driver.take(b"w1") == [control.Waiting([0, 2, 3], [])] * 3


def test_the_join_deadline_counts_from_the_last_member() -> None:
    driver = Driver()
    driver.send(b"w0", join(0, 3))
    driver.advance(50 * SECOND_US)
    driver.send(b"w1", join(1, 3))
    driver.advance(59 * SECOND_US)
    assert isinstance(driver.take(b"w0")[-1], control.Waiting)
    driver.advance(SECOND_US)
    for name in (b"w0", b"w1"):
        refused = driver.last(name, control.Refused)
        assert refused.code == "join_timeout"
        assert "60 s for rank 2 of world size 3" in refused.text
        assert A0 in refused.text
    assert driver.table.next_deadline_us is None


@pytest.mark.parametrize(
    ("limits", "features_limit", "setting", "expected"),
    [
        ((2048, 2048), 2048, 2048, 2048),
        ((2048, 300), 2048, 2048, 256),
        ((2048, 2048), 256, 2048, 256),
        ((64, 512), 512, 512, 64),
        ((2048, 2048), 2048, 1000, 512),
    ],
)
def test_packet_size_is_what_all_can_do(
    limits: tuple[int, int], features_limit: int, setting: int, expected: int
) -> None:
    driver = Driver(DatapathFeatures("127.0.0.1", 1, 64, features_limit), max_chunk_elems=setting)
    for rank, limit in enumerate(limits):
        driver.send(b"w%d" % rank, join(rank, max_chunk_elems=limit))
    welcome = driver.last(b"w0", control.Welcome)
    assert welcome.chunk_elems == expected
    assert welcome.multicast_host == ""


@pytest.mark.parametrize(
    ("group", "answers", "results"), [(True, (True, False), "unicast"), (False, (True, True), "unicast")]
)
def test_multicast_needs_a_group_and_all_ranks(group: bool, answers: tuple[bool, bool], results: str) -> None:
    driver = Driver() if group else Driver(DatapathFeatures("127.0.0.1", 1, 64, 2048))
    members = driver.join_all()
    for (name, token), multicast_ok in zip(members.items(), answers, strict=True):
        driver.send(name, control.Ready(token, True, multicast_ok, ""))
    assert driver.last(b"w0", control.Started).results == results
    assert list(driver.results.values()) == [False]


def test_slots_wanted() -> None:
    driver = Driver(total_slots=1024)
    driver.send(b"w0", join(0, slots_wanted=3))
    driver.send(b"w1", join(1, slots_wanted=100))
    assert driver.last(b"w0", control.Welcome).slots == 128


# -- refusals (C35) ----------------------------------------------------------------------------------------------------


def test_two_workers_with_one_rank() -> None:
    driver = Driver()
    driver.send(b"w0", join(0))
    driver.send(b"x", join(0, data_port=4999, host_name="other", pid=999))
    refused = driver.last(b"x", control.Refused)
    assert refused.code == "duplicate_rank"
    assert "rank 0 at 127.0.0.1:4999 (host other, pid 999)" in refused.text
    assert A0 in refused.text
    driver.advance(SECOND_US)
    assert driver.last(b"w0", control.Waiting).notes == [refused.text], "the right one is told why it waits"
    driver.send(b"w1", join(1))
    assert driver.last(b"w0", control.Welcome)


@pytest.mark.parametrize("started", [False, True])
def test_two_rank_0_with_run_ids_of_their_own(started: bool) -> None:
    """Each rank 0 draws a run_id. The later one is refused once the earlier shows that it lives."""
    driver = Driver()
    members = driver.start_all() if started else {}
    if not started:
        driver.send(b"w0", join(0))
    driver.send(b"x", join(0, run_id="run-b", data_port=4999, pid=999))
    assert "run-a" in driver.last(b"x", control.Waiting).notes[-1]
    driver.advance(4 * SECOND_US, beating(members))
    refused = next(m for m in driver.take(b"x") if isinstance(m, control.Refused))
    assert refused.code == "duplicate_rank"
    assert A0 in refused.text
    assert "127.0.0.1:4999" in refused.text
    assert "run-a" in refused.text
    assert "run-b" in refused.text
    if not started:
        assert driver.last(b"w0", control.Waiting).notes == [refused.text]
    assert len(driver.table.status(driver.now_us)["jobs"]) == 1


def test_an_elder_that_repeats_its_join_refuses_the_younger_at_once() -> None:
    driver = Driver()
    driver.send(b"w0", join(0))
    driver.send(b"x", join(1, run_id="run-b", data_port=4999))
    driver.advance(SECOND_US // 10)
    driver.send(b"w0", join(0))
    assert driver.last(b"x", control.Refused).code == "job_running"


def test_wrong_world_size() -> None:
    driver = Driver()
    driver.send(b"w0", join(0, 3))
    driver.send(b"w1", join(1, 3))
    driver.send(b"w2", join(2, 2))
    refused = driver.last(b"w2", control.Refused)
    assert refused.code == "rank_range", "rank 2 of 2 cannot be"
    driver.send(b"x", join(1, 2, data_port=4999, pid=999))
    refused = driver.last(b"x", control.Refused)
    assert refused.code == "world_size"
    for part in ("rank 1 at 127.0.0.1:4999", "pid 999", "is 2", A0, "says 3"):
        assert part in refused.text
    driver.advance(SECOND_US)
    notes = driver.last(b"w0", control.Waiting).notes
    assert len(notes) == 2
    assert notes[1] == refused.text


def test_rank_out_of_range() -> None:
    driver = Driver()
    driver.send(b"x", join(5, 4))
    refused = driver.last(b"x", control.Refused)
    assert refused.code == "rank_range"
    assert "rank 5 at 127.0.0.1:4005 (host host5, pid 105)" in refused.text
    assert "0 to 3" in refused.text
    driver.send(b"w0", join(0, 4))
    assert driver.last(b"w0", control.Waiting).notes == [refused.text], "told also to who came later"


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"protocol_version": 2}, "version"),
        ({"job": ""}, "malformed"),
        ({"job": "x" * 129}, "malformed"),
        ({"job": "a\nb"}, "malformed"),
        ({"run_id": "x" * 65}, "malformed"),
        ({"host_name": "x" * 256}, "malformed"),
        ({"data_host": "localhost"}, "malformed"),
        ({"data_host": "224.0.0.1"}, "malformed"),
        ({"data_host": "255.255.255.255"}, "malformed"),
        ({"data_host": "0.0.0.0"}, "malformed"),
        ({"data_port": 0}, "malformed"),
        ({"data_port": 65536}, "malformed"),
        ({"max_chunk_elems": 63}, "malformed"),
        ({"pid": -1}, "malformed"),
        ({"slots_wanted": 8193}, "no_slots"),
        ({"slots_wanted": -1}, "no_slots"),
        ({"world_size": 65}, "world_size"),
        ({"world_size": 0}, "world_size"),
        ({"rank": -1}, "rank_range"),
    ],
)
def test_what_cannot_be_is_refused(fields: dict[str, object], code: str) -> None:
    driver = Driver()
    driver.send(b"x", join(**fields))
    assert driver.last(b"x", control.Refused).code == code
    assert driver.table.status(driver.now_us)["jobs"] == []
    assert driver.table.counters[f"refused_{code}"] == 1


def test_malformed_frames_are_counted() -> None:
    driver = Driver()
    driver.run(driver.table.malformed(b"x", "not msgpack"))
    assert driver.last(b"x", control.Refused).code == "malformed"
    assert driver.table.counters["refused_malformed"] == 1


def test_a_data_address_belongs_to_one_worker() -> None:
    driver = Driver()
    driver.send(b"w0", join(0))
    driver.send(b"w1", join(1, data_port=4000))
    refused = driver.last(b"w1", control.Refused)
    assert refused.code == "duplicate_rank"
    assert A0 in refused.text
    driver.send(b"other", join(0, 1, job="other"))
    assert driver.last(b"other", control.Refused).code == "duplicate_rank"


def test_strangers_are_told_that_they_are_none() -> None:
    driver = Driver()
    for message in (control.Heartbeat("x", 0, 0), control.Ready("x", True, True, ""), control.Leave("x")):
        driver.send(b"x", message)
        assert driver.last(b"x", control.Refused).code == "unknown_member"


def test_a_rank_that_left_does_not_come_back_into_the_running_job() -> None:
    driver = Driver()
    members = driver.start_all()
    driver.send(b"w0", control.Leave(members[b"w0"]))
    driver.send(b"w0", join(0))
    assert driver.last(b"w0", control.Refused).code == "duplicate_rank"


# -- the data path -----------------------------------------------------------------------------------------------------


def test_a_failed_data_path_is_told_to_all_with_its_ranks() -> None:
    driver = Driver()
    members = driver.join_all(3)
    driver.send(b"w0", control.Ready(members[b"w0"], True, True, ""))
    driver.send(b"w1", control.Ready(members[b"w1"], False, False, "no answer to a probe"))
    assert driver.take(b"w0") == []
    driver.send(b"w2", control.Ready(members[b"w2"], True, True, ""))
    for name in members:
        text = driver.last(name, control.JobFailed).text
        assert "failed for rank 1: rank 1 at 127.0.0.1:4001 (host host1, pid 101): no answer to a probe" in text
    assert not driver.open_jobs


def test_who_never_gets_ready_ends_the_job() -> None:
    driver = Driver()
    members = driver.join_all()
    driver.send(b"w0", control.Ready(members[b"w0"], True, True, ""))
    driver.advance(10 * SECOND_US)
    assert "rank 1 did not say within 10 s" in driver.last(b"w0", control.JobFailed).text
    assert not driver.open_jobs


def test_who_leaves_before_the_start_ends_the_job() -> None:
    driver = Driver()
    members = driver.join_all()
    driver.send(b"w0", control.Leave(members[b"w0"]))
    assert driver.last(b"w0", control.Left)
    assert A0 in driver.last(b"w1", control.JobFailed).text


def test_the_datapath_may_refuse() -> None:
    driver = Driver()
    driver.open_error = "no memory"
    driver.send(b"w0", join(0))
    driver.send(b"w1", join(1))
    for name in (b"w0", b"w1"):
        assert "no memory" in driver.last(name, control.JobFailed).text
    driver.open_error = None
    assert driver.start_all(run_id="next")


# -- leases ------------------------------------------------------------------------------------------------------------


def test_a_silent_rank_ends_the_job_when_its_lease_does() -> None:
    driver = Driver()
    members = driver.start_all(3)
    alive = beating(members, b"w2")
    driver.advance(2 * SECOND_US, alive)
    assert driver.last(b"w0", control.HeartbeatReply).silent_ranks == [2]
    driver.advance(SECOND_US, alive)
    failed = [m for m in driver.take(b"w0") if isinstance(m, control.JobFailed)]
    assert failed == [control.JobFailed("rank 2 at 127.0.0.1:4002 (host host2, pid 102) sent no heartbeat for 3.0 s")]
    assert not [m for m in driver.take(b"w2") if isinstance(m, control.JobFailed)]
    assert not driver.open_jobs
    driver.send(b"w0", control.Heartbeat(members[b"w0"], 0, 0))
    assert "rank 2" in driver.last(b"w0", control.Refused).text, "who asks later is told why"
    driver.send(b"w2", control.Heartbeat(members[b"w2"], 0, 0))
    assert "sent no heartbeat" in driver.last(b"w2", control.Refused).text


def test_heartbeats_keep_a_job_alive() -> None:
    driver = Driver()
    members = driver.start_all()
    driver.advance(100 * SECOND_US, beating(members))
    assert len(driver.open_jobs) == 1


def test_a_rank_that_left_has_no_lease() -> None:
    driver = Driver()
    members = driver.start_all()
    driver.send(b"w0", control.Leave(members[b"w0"]))
    driver.advance(10 * SECOND_US, beating(members, b"w0"))
    assert len(driver.open_jobs) == 1


def test_the_next_run_takes_over_when_the_lease_of_the_dead_ends() -> None:
    """C29: after kill -9 of all workers a new job of the same name, at the same addresses, needs nobody's help."""
    driver = Driver()
    driver.start_all()
    (old,) = driver.open_jobs.values()
    driver.advance(SECOND_US)
    for rank in range(2):
        driver.send(b"x%d" % rank, join(rank, run_id="run-b", pid=200 + rank))
    assert "run-a" in driver.last(b"x0", control.Waiting).notes[-1]
    driver.advance(2 * SECOND_US)
    assert driver.last(b"x0", control.Welcome)
    assert driver.last(b"x1", control.Welcome)
    (new,) = driver.open_jobs.values()
    assert (old.job_number, old.epoch) != (new.job_number, new.epoch)


def test_leaving_is_no_sign_of_life() -> None:
    driver = Driver()
    members = driver.start_all()
    driver.send(b"x", join(0, 1, run_id="run-b"))
    driver.send(b"w0", control.Leave(members[b"w0"]))
    assert isinstance(driver.take(b"x")[-1], control.Waiting)
    driver.send(b"w1", control.Leave(members[b"w1"]))
    assert driver.last(b"x", control.Welcome)


def test_a_worker_that_died_while_joining_makes_place() -> None:
    driver = Driver()
    driver.send(b"w0", join(0))
    driver.gone.add(b"w0")
    driver.send(b"x0", join(0, run_id="run-b", pid=200))
    driver.send(b"x1", join(1, run_id="run-b", pid=201))
    driver.advance(SECOND_US)
    assert driver.last(b"x1", control.Welcome)


def test_a_dead_rank_can_be_replaced_while_the_others_wait() -> None:
    driver = Driver()
    driver.send(b"w0", join(0, 3))
    driver.send(b"w1", join(1, 3))
    driver.gone.add(b"w1")
    driver.advance(2 * SECOND_US)
    assert driver.last(b"w0", control.Waiting).missing_ranks == [1, 2]
    driver.send(b"y", join(1, 3, pid=300))
    assert driver.last(b"y", control.Waiting).missing_ranks == [2]


# -- numbers, epochs, slots, limits ------------------------------------------------------------------------------------


def test_numbers_are_reused_late_and_under_the_next_epoch() -> None:
    driver = Driver(total_slots=8, slots_per_job=4)
    seen: dict[int, list[int]] = {}
    for run in range(3 * 256):
        (token,) = driver.start_all(1, run_id=f"run{run}").values()
        driver.send(b"w0", control.Leave(token))
        job = driver.opened[-1]
        assert job.job_number == run % 256
        seen.setdefault(job.job_number, []).append(job.epoch)
    assert len({epochs[0] for epochs in seen.values()}) > 100, "first epochs are random"
    for first, second, third in seen.values():
        assert second == (first + 1) % 256
        assert third == (first + 2) % 256


def test_slots_run_out_and_come_back() -> None:
    driver = Driver(total_slots=16, slots_per_job=8)
    for index in range(2):
        driver.start_all(1, prefix=b"j%d" % index, job=f"job{index}", data_port=5000 + index)
    driver.send(b"late", join(0, 1, job="late"))
    refused = driver.last(b"late", control.Refused)
    assert refused.code == "no_slots"
    assert "16 of 16" in refused.text
    driver.advance(3 * SECOND_US)
    assert not driver.open_jobs
    driver.start_all(1, job="late", slots_wanted=16)


def test_a_flood_of_joins_occupies_no_more_than_the_limits() -> None:
    driver = Driver(max_jobs=10, max_members=25)
    for index in range(2000):
        driver.send(
            b"flood%d" % index, join(index % 3, 4, job=f"job{index // 3}", data_port=1000 + index, host_name="h" * 255)
        )
    status = driver.table.status(driver.now_us)
    assert len(status["jobs"]) <= 10
    assert sum(len(job["members"]) for job in status["jobs"]) == 25
    assert driver.table.counters["refused_limits"] == 2000 - 25
    assert len(status["refused"]) <= 8
    assert len(list(driver.table._jobs._refused)) <= 256
    driver.advance(61 * SECOND_US)
    assert driver.table.status(driver.now_us)["jobs"] == []


def test_a_long_text_of_an_agent_is_cut() -> None:
    driver = Driver()
    members = driver.join_all()
    for name, token in members.items():
        driver.send(name, control.Ready(token, False, False, "x" * 60_000))
    assert len(driver.last(b"w0", control.JobFailed).text) < 2000


# -- the secret --------------------------------------------------------------------------------------------------------


def prove(driver: Driver, name: bytes, message: control.Join, secret: str) -> control.Join:
    driver.send(name, message)
    nonce = driver.last(name, control.Challenge).nonce
    proof = control.join_proof(secret, nonce, message)
    return control.Join(**{f: getattr(message, f) for f in message.__struct_fields__} | {"proof": proof})


def test_the_secret_is_asked_for() -> None:
    driver = Driver(secret="open sesame")
    proven = prove(driver, b"w0", join(0), "open sesame")
    driver.send(b"w0", proven)
    assert driver.last(b"w0", control.Waiting)
    driver.send(b"w1", prove(driver, b"w1", join(1), "open barley"))
    refused = driver.last(b"w1", control.Refused)
    assert refused.code == "secret"
    assert "sesame" not in refused.text
    driver.send(b"thief", proven)
    assert driver.last(b"thief", control.Waiting), "the very same Join is a repetition, from wherever it comes"
    moved = control.Join(**{f: getattr(proven, f) for f in proven.__struct_fields__} | {"data_port": 6666})
    driver.send(b"w0", moved)
    assert driver.last(b"w0", control.Refused).code == "secret", "the proof covers all fields"


def test_a_proof_does_not_last() -> None:
    driver = Driver(secret="open sesame")
    proven = prove(driver, b"w0", join(0), "open sesame")
    driver.now_us += 61 * SECOND_US
    driver.send(b"w0", proven)
    assert driver.last(b"w0", control.Refused).code == "secret"


def test_the_nonce_is_for_one_connection() -> None:
    driver = Driver(secret="open sesame")
    proven = prove(driver, b"w0", join(0), "open sesame")
    driver.send(b"other", proven)
    assert driver.last(b"other", control.Refused).code == "secret"


def test_status_needs_the_secret_too() -> None:
    driver = Driver(secret="open sesame")
    driver.send(b"s", control.StatusRequest())
    nonce = driver.last(b"s", control.Challenge).nonce
    driver.send(b"s", control.StatusRequest(control.status_proof("wrong", nonce)))
    assert driver.last(b"s", control.Refused).code == "secret"
    assert driver.status_sent_to == []
    driver.send(b"s", control.StatusRequest(control.status_proof("open sesame", nonce)))
    assert driver.status_sent_to == [b"s"]


def test_status_tells_no_token() -> None:
    driver = Driver()
    tokens = driver.start_all().values()
    text = repr(driver.table.status(driver.now_us))
    assert not any(token in text for token in tokens)
    driver.send(b"s", control.StatusRequest())
    assert driver.status_sent_to == [b"s"]


# -- the rest ----------------------------------------------------------------------------------------------------------


def test_shut_down_tells_everybody() -> None:
    driver = Driver()
    driver.start_all()
    driver.send(b"x", join(0, job="other", data_port=7000))
    driver.run(driver.table.shut_down("stopped"))
    for name in (b"w0", b"w1", b"x"):
        assert driver.last(name, control.JobFailed).text == "stopped"
    assert not driver.open_jobs


@pytest.mark.parametrize(
    "wrong",
    [
        {"total_slots": 1000},
        {"total_slots": 65536},
        {"slots_per_job": 2},
        {"total_slots": 64, "slots_per_job": 128},
        {"max_chunk_elems": 63},
        {"secret": ""},
        {"max_jobs": 257},
        {"lease_us": 900_000},
    ],
)
def test_settings_that_cannot_work(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        JobTableSettings(**wrong)
