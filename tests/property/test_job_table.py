"""No slot, number or job is ever lost, whatever agents say, repeat, or fail to say."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from netsum.protocol import control
from netsum.protocol.slot_ranges import SlotRanges
from tests.job_table_driver import SECOND_US, Driver, join

TOTAL_SLOTS = 64
LONGEST_LEASE_US = 61 * SECOND_US  # a job that nobody keeps alive is gone after the longest of its timers


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 6), st.integers(0, 50)), max_size=80))
def test_ranges_never_overlap_and_come_back(steps: list[tuple[bool, int, int]]) -> None:
    ranges, held = SlotRanges(TOTAL_SLOTS), []
    for free, power, which in steps:
        if free and held:
            ranges.free(*held.pop(which % len(held)))
            continue
        slots = 1 << power
        base = ranges.allocate(slots)
        if base is not None:
            assert base % slots == 0
            assert base + slots <= TOTAL_SLOTS
            assert all(base + slots <= b or b + s <= base for b, s in held)
            held.append((base, slots))
        else:
            starts = range(0, TOTAL_SLOTS, slots)
            assert all(any(b < first + slots and first < b + s for b, s in held) for first in starts), (
                "a gap was missed"
            )
        assert ranges.slots_taken == sum(s for _, s in held)
    for base, slots in held:
        ranges.free(base, slots)
    assert ranges.allocate(TOTAL_SLOTS) == 0


class AgentsAtRandom(RuleBasedStateMachine):
    """A few identities that send anything at any time. The driver's datapath model checks each OpenJob as a real one would."""

    @initialize(secret=st.sampled_from([None, "s"]))
    def start(self, secret: str | None) -> None:
        self.driver = Driver(total_slots=TOTAL_SLOTS, slots_per_job=16, max_jobs=6, max_members=12, secret=secret)
        self.tokens: list[str] = ["stranger"]
        self.joins: dict[bytes, control.Join] = {}

    def _collect(self) -> None:
        for identity, messages in list(self.driver.inbox.items()):
            for message in messages:
                if isinstance(message, control.Welcome):
                    self.tokens.append(message.member)
                if isinstance(message, control.Challenge) and identity in self.joins:
                    plain = self.joins.pop(identity)
                    proof = control.join_proof("s", message.nonce, plain)
                    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
                    self.driver.send(identity, control.Join(**fields | {"proof": proof}))
            self.driver.inbox.pop(identity, None)

    @rule(
        who=st.integers(0, 7),
        rank=st.integers(-1, 3),
        world_size=st.integers(1, 3),
        job=st.sampled_from(["a", "b", "c"]),
        run_id=st.sampled_from(["r1", "r2", "r3"]),
        port=st.integers(4000, 4015),
        slots=st.sampled_from([0, 4, 20, 64]),
    )
    def joins_in(self, who: int, rank: int, world_size: int, job: str, run_id: str, port: int, slots: int) -> None:
        identity = b"w%d" % who
        message = join(rank, world_size, job=job, run_id=run_id, data_port=port, slots_wanted=slots, pid=port)
        self.joins[identity] = message
        self.driver.send(identity, message)
        self._collect()

    @rule(job=st.sampled_from(["a", "b"]), run_id=st.sampled_from(["r1", "r2"]), start=st.integers(4000, 4012))
    def a_whole_job_joins(self, job: str, run_id: str, start: int) -> None:
        for rank in range(2):
            self.joins_in(rank, rank, 2, job, run_id, start + rank, 0)

    @rule(who=st.integers(0, 7), which=st.integers(0, 20), kind=st.sampled_from(["ready", "bad", "beat", "leave"]))
    def member_says(self, who: int, which: int, kind: str) -> None:
        token = self.tokens[-1 - which % len(self.tokens)]
        message: control.AgentMessage
        match kind:
            case "ready" | "bad":
                message = control.Ready(token, kind == "ready", True, "")
            case "beat":
                message = control.Heartbeat(token, 1, 1)
            case _:
                message = control.Leave(token)
        self.driver.send(b"w%d" % who, message)
        self._collect()

    @rule(duration_us=st.sampled_from([1, 100_000, SECOND_US, 3 * SECOND_US]))
    def time_passes(self, duration_us: int) -> None:
        self.driver.advance(duration_us)
        self._collect()

    @rule(who=st.integers(0, 7))
    def connection_breaks(self, who: int) -> None:
        self.driver.run(self.driver.table.unreachable(b"w%d" % who, self.driver.now_us))
        self._collect()

    @rule(error=st.sampled_from([None, "broken"]))
    def datapath_breaks_or_heals(self, error: str | None) -> None:
        self.driver.open_error = error

    @invariant()
    def the_table_and_the_datapath_agree(self) -> None:
        status = self.driver.table.status(self.driver.now_us)
        active = [job for job in status["jobs"] if job["phase"] in ("probing", "running")]
        assert {job["job_number"] for job in active} == set(self.driver.open_jobs)
        assert status["slots_taken"] == sum(job["slots"] for job in active)
        assert all(job["members"] for job in status["jobs"])
        assert len({job["job"] for job in active}) == len(active), "one incarnation of a name is active"
        assert len(status["jobs"]) <= 6
        assert sum(len(job["members"]) for job in status["jobs"]) <= 12
        if status["jobs"]:
            assert self.driver.table.next_deadline_us is not None

    def teardown(self) -> None:
        """Nobody says anything any more: all of it goes."""
        if not hasattr(self, "driver"):
            return
        self.driver.advance(3 * LONGEST_LEASE_US)
        status = self.driver.table.status(self.driver.now_us)
        assert status["jobs"] == []
        assert status["slots_taken"] == 0
        assert not self.driver.open_jobs
        assert self.driver.table.next_deadline_us is None
        assert self.driver.table._jobs._tokens == {}
        assert sorted(self.driver.table._jobs._free_numbers) == list(range(256))


TestAgentsAtRandom = AgentsAtRandom.TestCase
TestAgentsAtRandom.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
