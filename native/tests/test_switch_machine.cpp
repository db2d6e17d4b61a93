#include <doctest/doctest.h>

#include <stdexcept>
#include <string>
#include <vector>

#include "netsum/switch_machine.hpp"
#include "netsum/wire.hpp"

using namespace netsum;

namespace {

using Bytes = std::vector<std::uint8_t>;

constexpr std::uint8_t kJob = 3;
constexpr std::uint8_t kEpoch = 5;
constexpr std::uint16_t kSlotBase = 16;
constexpr std::uint32_t kSlots = 4;
constexpr std::size_t kChunkElems = 64;
const Address kWorkers[] = {{0x0A000001, 1000}, {0x0A000002, 1000}, {0x0A000002, 1001}};

struct Sent {
    std::string kind;
    Address to;
    Bytes datagram;
};

struct Recorder final : SwitchSink {
    void result(std::uint8_t, std::span<const std::uint8_t> d) override { add("result", {}, d); }
    void replay(std::uint8_t, const Address& to, std::span<const std::uint8_t> d) override { add("replay", to, d); }
    void answer(const Address& to, std::span<const std::uint8_t> d) override { add("answer", to, d); }
    void probe_all(std::uint8_t, std::span<const std::uint8_t> d) override { add("probe_all", {}, d); }
    void flush() override { ++flushes; }
    void add(const char* kind, const Address& to, std::span<const std::uint8_t> d) {
        sent.push_back({kind, to, Bytes(d.begin(), d.end())});
    }

    std::vector<Sent> sent;
    int flushes = 0;
};

// A job of `world_size` workers, and what was sent for it.
struct Fixture {
    explicit Fixture(std::size_t world_size = 3) {
        machine.open_job({kJob, kEpoch, kSlotBase, kSlots, kChunkElems, {kWorkers, kWorkers + world_size}});
    }
    // Hands a datagram of `rank` in; returns what went out for it.
    std::vector<Sent> handle(std::uint32_t rank, const Bytes& datagram) {
        sink.sent.clear();
        machine.handle(datagram, kWorkers[rank], sink);
        return sink.sent;
    }
    std::uint64_t drops(SwitchDrop reason) const { return machine.counters().drops[static_cast<std::size_t>(reason)]; }

    SwitchMachine machine;
    Recorder sink;
};

Header header_of(std::uint32_t number, MsgType type = MsgType::Data) {
    Header header;
    header.msg_type = static_cast<std::uint8_t>(type);
    header.size_code = static_cast<std::uint8_t>(size_code_of(kChunkElems));
    header.job_number = kJob;
    header.tsi = std::uint32_t{kEpoch} << 24 | number;
    header.pool_index = static_cast<std::uint16_t>((number / kSlots % 2) << 15 | (kSlotBase + number % kSlots));
    return header;
}

// A contribution of `value` in every element.
Bytes contribution(std::uint32_t number, std::int32_t value, int e0 = 0, MsgType type = MsgType::Data) {
    Bytes datagram(type == MsgType::Exponents ? exponents_bytes(kChunkElems) : data_bytes(kChunkElems));
    write_header(header_of(number, type), datagram.data());
    datagram[kHeaderBytes] = static_cast<std::uint8_t>(e0);
    for (std::size_t i = exponents_bytes(kChunkElems); i < datagram.size(); ++i) {
        datagram[i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(value) >> (8 * (3 - (i - 10) % 4)));
    }
    return datagram;
}

}  // namespace

TEST_CASE("switch: the last contribution sends the sum and the largest exponent to all") {
    Fixture job;
    CHECK(job.handle(0, contribution(1, INT32_MAX, -128)).empty());
    CHECK(job.handle(2, contribution(1, 5, -3)).empty());
    CHECK(job.machine.slots_in_use(kJob) == 1);
    CHECK(job.machine.awaited_ranks(kJob) == std::vector<std::uint32_t>{1});
    const auto sent = job.handle(1, contribution(1, -1, -7));
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].kind == "result");
    CHECK(sent[0].datagram == contribution(1, static_cast<std::int32_t>(std::uint32_t{INT32_MAX} + 4u), -3));
    CHECK(job.machine.slots_in_use(kJob) == 0);
    CHECK(job.machine.awaited_ranks(kJob).empty());
    CHECK(job.machine.job_counters(kJob).results == 1);
    CHECK(job.machine.job_counters(kJob).contributions == 3);
}

TEST_CASE("switch: the unused bit and padding of a contribution do not come back") {
    Fixture job(1);
    Bytes datagram = contribution(0, 7);
    datagram[0] |= 0x08;
    datagram.resize(datagram.size() + 9, 0xFF);
    const auto sent = job.handle(0, datagram);
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].datagram == contribution(0, 7));
}

TEST_CASE("switch: exponents alone") {
    Fixture job(2);
    CHECK(job.handle(0, contribution(2, 0, 4, MsgType::Exponents)).empty());
    const auto sent = job.handle(1, contribution(2, 0, 9, MsgType::Exponents));
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].datagram == contribution(2, 0, 9, MsgType::Exponents));
}

TEST_CASE("switch: a repeated contribution is answered, not summed") {
    Fixture job;
    job.handle(0, contribution(0, 1));
    auto sent = job.handle(0, contribution(0, 1));
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].kind == "answer");
    CHECK(sent[0].to == kWorkers[0]);
    Bytes pending(kHeaderBytes + 1);
    write_header(header_of(0, MsgType::Pending), pending.data());
    pending[kHeaderBytes] = 0b110;
    CHECK(sent[0].datagram == pending);

    job.handle(1, contribution(0, 1));
    job.handle(2, contribution(0, 1));
    sent = job.handle(1, contribution(0, 1));
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].kind == "replay");
    CHECK(sent[0].to == kWorkers[1]);
    CHECK(sent[0].datagram == contribution(0, 3));
    CHECK(job.machine.counters().duplicates == 1);
    CHECK(job.machine.counters().replays == 1);
    CHECK(job.machine.counters().contributions == 3);
}

TEST_CASE("switch: a contribution delayed for two rounds is stale, although its version fits") {
    Fixture job(2);
    for (const std::uint32_t number : {0u, kSlots, 2 * kSlots}) {
        job.handle(0, contribution(number, 1));
        if (number < 2 * kSlots) job.handle(1, contribution(number, 1));
    }
    CHECK(job.handle(1, contribution(0, 1000)).empty());
    CHECK(job.drops(SwitchDrop::StaleNumber) == 1);
    const auto sent = job.handle(1, contribution(2 * kSlots, 1));
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].datagram == contribution(2 * kSlots, 2));
}

TEST_CASE("switch: numbers wrap at 2^24") {
    Fixture job(1);
    constexpr std::uint32_t kLast = (1u << 24) - 2 * kSlots;  // the slot and version of 0
    CHECK(job.handle(0, contribution(kLast, 1)).size() == 1);
    const auto sent = job.handle(0, contribution(0, 2));
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].datagram == contribution(0, 2));
    CHECK(job.handle(0, contribution(kLast, 1)).empty());
    CHECK(job.drops(SwitchDrop::StaleNumber) == 1);
}

TEST_CASE("switch: an incomplete sum is never discarded, kinds are never mixed") {
    Fixture job(2);
    job.handle(0, contribution(0, 1));
    CHECK(job.handle(0, contribution(2 * kSlots, 1)).empty());
    CHECK(job.drops(SwitchDrop::SlotBusy) == 1);
    CHECK(job.handle(1, contribution(0, 1, 0, MsgType::Exponents)).empty());
    CHECK(job.drops(SwitchDrop::KindMismatch) == 1);
    CHECK(job.handle(1, contribution(0, 1)).size() == 1);
}

TEST_CASE("switch: what does not belong here is dropped under its reason") {
    Fixture job(2);
    const Bytes good = contribution(0, 1);
    const auto with = [&good](std::size_t position, std::uint8_t value) {
        Bytes bad = good;
        bad[position] = value;
        return bad;
    };
    struct Case {
        SwitchDrop reason;
        Bytes datagram;
        std::uint32_t from;
    };
    const Case cases[] = {
        {SwitchDrop::TooShort, Bytes(good.begin(), good.begin() + 7), 0},
        {SwitchDrop::TooShort, {}, 0},
        {SwitchDrop::BadType, with(0, 0x21), 0},  // PENDING
        {SwitchDrop::UnknownSource, good, 2},
        {SwitchDrop::WrongJob, with(1, kJob + 1), 0},
        {SwitchDrop::BadSizeCode, with(0, 0x13), 0},
        {SwitchDrop::BadLength, Bytes(good.begin(), good.end() - 1), 0},
        {SwitchDrop::StaleEpoch, with(2, kEpoch - 1), 0},
        {SwitchDrop::BadSlot, with(7, kSlotBase + 1), 0},  // not the slot of its number
        {SwitchDrop::BadSlot, with(6, 0x80), 0},           // not its version
        {SwitchDrop::BadSlot, with(7, kSlotBase + kSlots), 0},
        {SwitchDrop::BadSlot, with(7, kSlotBase - 1), 0},
    };
    for (const Case& c : cases) {
        CAPTURE(static_cast<int>(c.reason));
        const std::uint64_t before = job.drops(c.reason);
        CHECK(job.handle(c.from, c.datagram).empty());
        CHECK(job.drops(c.reason) == before + 1);
    }
    CHECK(job.machine.counters().packets_in == std::size(cases));
    CHECK(job.machine.job_counters(kJob).packets_in == std::size(cases) - 4);  // those of known sources
    CHECK(job.machine.counters().contributions == 0);
}

TEST_CASE("switch: a probe is answered by unicast, and by multicast where there is a group") {
    Fixture job(2);
    Bytes probe(data_bytes(kChunkElems));
    Header header = header_of(0, MsgType::Probe);
    header.tsi = 0xCAFE;
    header.pool_index = 0;
    write_header(header, probe.data());
    Bytes expected = probe;
    expected[7] = 1;
    auto sent = job.handle(1, probe);
    REQUIRE(sent.size() == 1);
    CHECK(sent[0].to == kWorkers[1]);
    CHECK(sent[0].datagram == expected);
    job.machine.set_multicast(kJob, true);
    sent = job.handle(1, probe);
    REQUIRE(sent.size() == 2);
    expected[7] = 2;
    CHECK(sent[1].kind == "probe_all");
    CHECK(sent[1].datagram == expected);
    CHECK(job.machine.counters().probes == 2);
}

TEST_CASE("switch: a slot is claimed only after its queued result is flushed") {
    Fixture job(1);
    job.handle(0, contribution(0, 1));
    job.handle(0, contribution(kSlots, 1));  // the other version
    CHECK(job.sink.flushes == 0);
    job.handle(0, contribution(2 * kSlots, 1));
    CHECK(job.sink.flushes == 1);
    job.handle(0, contribution(3 * kSlots, 1));  // flushed together with the first
    CHECK(job.sink.flushes == 1);
    job.machine.flushed();
    job.handle(0, contribution(4 * kSlots, 1));
    CHECK(job.sink.flushes == 1);
    job.handle(0, contribution(4 * kSlots, 1));  // a replay may be queued as well
    job.handle(0, contribution(6 * kSlots, 1));
    CHECK(job.sink.flushes == 2);
}

TEST_CASE("switch: jobs open and close") {
    Fixture job(2);
    const SwitchJobConfig other{4, 1, 0, 4, 256, {{1, 1}, {1, 2}}};
    const auto refused = [&](auto change) {
        SwitchJobConfig bad = other;
        change(bad);
        CHECK_THROWS_AS(job.machine.open_job(bad), std::invalid_argument);
    };
    refused([](auto& c) { c.job_number = kJob; });
    refused([](auto& c) { c.slots = 2; });
    refused([](auto& c) { c.slots = 12; });
    refused([](auto& c) { c.slot_base = 0x7FFD; });
    refused([](auto& c) { c.chunk_elems = 128; });
    refused([](auto& c) { c.workers.clear(); });
    refused([](auto& c) { c.workers[1] = c.workers[0]; });
    refused([](auto& c) { c.workers[1] = kWorkers[0]; });
    job.machine.open_job(other);  // no refusal left anything behind

    job.handle(0, contribution(0, 1));
    job.machine.close_job(kJob);
    job.machine.close_job(kJob);
    CHECK(job.handle(1, contribution(0, 1)).empty());
    CHECK(job.drops(SwitchDrop::UnknownSource) == 1);
    job.machine.open_job({kJob, kEpoch, kSlotBase, kSlots, kChunkElems, {kWorkers, kWorkers + 2}});
    CHECK(job.handle(1, contribution(0, 1)).empty());  // nothing is left of the sum before
    CHECK(job.machine.slots_in_use(kJob) == 1);
    CHECK_THROWS_AS(job.machine.set_multicast(77, true), std::invalid_argument);
}
