#include <doctest/doctest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory_network.hpp"
#include "netsum/wire.hpp"

using namespace netsum;
using namespace netsum::testing;

namespace {

using Floats = std::vector<float>;
constexpr float kInf = std::numeric_limits<float>::infinity();
const float kNaN = std::numeric_limits<float>::quiet_NaN();

// Whole numbers, so that the fixed-point sum is the exact sum.
float input(std::uint32_t rank, std::uint64_t i) {
    return static_cast<float>(static_cast<int>((i * 7919 + rank * 104729) % 2001) - 1000);
}

std::vector<Floats> inputs(std::uint32_t world_size, std::uint64_t numel) {
    std::vector<Floats> tensors(world_size, Floats(numel));
    for (std::uint32_t rank = 0; rank < world_size; ++rank) {
        for (std::uint64_t i = 0; i < numel; ++i) tensors[rank][i] = input(rank, i);
    }
    return tensors;
}

Floats sum_of(const std::vector<Floats>& tensors) {
    Floats sum(tensors[0].size());
    for (const Floats& tensor : tensors) {
        for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += tensor[i];
    }
    return sum;
}

bool same_bits(const Floats& a, const Floats& b) {
    return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

void submit_all(MemoryNetwork& network, std::vector<Floats>& tensors, OpCode op = OpCode::Sum) {
    for (std::uint32_t rank = 0; rank < tensors.size(); ++rank) {
        network.workers[rank]->submit(tensors[rank].data(), tensors[rank].size(), DType::Float32, op, network.now_us);
    }
}

// One float allreduce without an error; returns the ranks' results.
std::vector<Floats> allreduce(const JobShape& shape, std::uint64_t numel) {
    MemoryNetwork network(shape);
    auto tensors = inputs(shape.world_size, numel);
    submit_all(network, tensors);
    REQUIRE(network.run(1));
    for (const auto& of_rank : network.completions) REQUIRE(of_rank[0].error == WorkerError::None);
    return tensors;
}

std::uint64_t drops(const WorkerMachine& worker, WorkerDrop reason) {
    return worker.counters().drops[static_cast<std::size_t>(reason)];
}

}  // namespace

TEST_CASE("worker: exact sums in every packet size, clean and with loss, duplication and reordering") {
    for (const std::uint32_t chunk_elems : {64u, 256u, 512u, 1024u, 2048u}) {
        for (const bool faulty : {false, true}) {
            CAPTURE(chunk_elems);
            CAPTURE(faulty);
            JobShape shape;
            shape.chunk_elems = chunk_elems;
            if (faulty) shape.faults = {0.05, 0.05, 20, 2'000};
            MemoryNetwork network(shape);
            std::vector<std::vector<Floats>> operations;
            for (const std::uint64_t numel : {1ull, 63ull, 257ull, 5'000ull, 20'003ull}) {
                operations.push_back(inputs(shape.world_size, numel));
            }
            std::vector<Floats> expected;
            for (auto& tensors : operations) {
                expected.push_back(sum_of(tensors));
                submit_all(network, tensors);
            }
            std::vector<std::vector<std::int32_t>> integers(shape.world_size, std::vector<std::int32_t>(1'000));
            for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
                std::fill(integers[rank].begin(), integers[rank].end(), INT32_MAX - static_cast<std::int32_t>(rank));
                network.workers[rank]->submit(integers[rank].data(), 1'000, DType::Int32, OpCode::Sum, 0);
            }
            REQUIRE(network.run(operations.size() + 1));
            for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
                for (const Completion& completion : network.completions[rank])
                    CHECK(completion.error == WorkerError::None);
                for (std::size_t k = 0; k < operations.size(); ++k) CHECK(same_bits(operations[k][rank], expected[k]));
                CHECK(integers[rank] == std::vector<std::int32_t>(1'000, -10));  // 4 * (2^31 - 1) - 6 modulo 2^32
                const WorkerCounters& counters = network.workers[rank]->counters();
                CHECK((counters.fast_retransmits + counters.timer_retransmits > 0) == faulty);
                CHECK(network.workers[rank]->outstanding() == 0);
            }
            CHECK((network.the_switch.counters().replays > 0) == faulty);
            CHECK(network.the_switch.slots_in_use(MemoryNetwork::kJob) == 0);
        }
    }
}

TEST_CASE("worker: faults, packet size, slots and the form of exponents change no bit") {
    const auto tensors_of = [](JobShape shape) {
        MemoryNetwork network(shape);
        auto tensors = inputs(shape.world_size, 3'000);
        for (auto& tensor : tensors) {
            for (std::size_t i = 0; i < tensor.size(); ++i)
                tensor[i] = std::sin(tensor[i]) * std::ldexp(1.0f, int(i / 256) - 6);
        }
        submit_all(network, tensors, OpCode::Avg);
        REQUIRE(network.run(1));
        for (const auto& tensor : tensors) REQUIRE(same_bits(tensor, tensors[0]));
        return tensors[0];
    };
    JobShape shape;
    shape.world_size = 3;
    const Floats clean = tensors_of(shape);
    shape.short_exponents = false;
    CHECK(same_bits(tensors_of(shape), clean));
    shape.chunk_elems = 64;
    shape.slots = 32;
    CHECK(same_bits(tensors_of(shape), clean));
    for (std::uint64_t seed = 1; seed <= 5; ++seed) {
        CAPTURE(seed);
        shape.chunk_elems = seed % 2 ? 1024 : 256;
        shape.short_exponents = seed % 2;
        shape.slots = 4;
        shape.seed = seed;
        shape.faults = {0.1, 0.1, 10, 5'000};
        CHECK(same_bits(tensors_of(shape), clean));
    }
}

TEST_CASE("worker: the running number wraps at 2^24") {
    JobShape shape;
    shape.first_number = (1u << 24) - 16;
    shape.faults = {0.03, 0.03, 20, 1'000};
    auto expected = sum_of(inputs(shape.world_size, 30'000));
    for (const Floats& tensor : allreduce(shape, 30'000)) CHECK(same_bits(tensor, expected));
}

TEST_CASE("worker: what stands in the packets of one operation") {
    JobShape shape;
    shape.world_size = 1;
    shape.slots = 4;
    MemoryNetwork network(shape);
    std::vector<Header> headers;
    network.tamper = [&headers](std::uint32_t, Bytes& datagram) {
        headers.push_back(*read_header(datagram.data(), datagram.size()));
        return true;
    };
    auto tensors = inputs(1, 1'000);
    submit_all(network, tensors);
    REQUIRE(network.run(1));
    REQUIRE(headers.size() == 9);  // lag 4, payload 4, integrity 1
    for (std::uint32_t number = 0; number < headers.size(); ++number) {
        CAPTURE(number);
        CHECK(headers[number].msg_type == static_cast<int>(number < 4 ? MsgType::Exponents : MsgType::Data));
        CHECK(headers[number].tsi == (std::uint32_t{MemoryNetwork::kEpoch} << 24 | number));
        CHECK(headers[number].slot() == MemoryNetwork::kSlotBase + number % 4);
        CHECK(headers[number].version() == number / 4 % 2);
    }
    CHECK(network.workers[0]->counters().packets_out == 9);
    CHECK(network.workers[0]->counters().bytes_out == 4 * exponents_bytes(256) + 5 * data_bytes(256));
    CHECK(network.workers[0]->srtt_us() > 0);
}

TEST_CASE("worker: elements that are not finite spread to nobody else") {
    for (const std::uint32_t chunk_elems : {64u, 256u, 1024u}) {
        CAPTURE(chunk_elems);
        JobShape shape;
        shape.chunk_elems = chunk_elems;
        shape.faults = {0.05, 0.05, 20, 1'000};
        MemoryNetwork network(shape);
        auto tensors = inputs(shape.world_size, 3'001);
        Floats expected = sum_of(tensors);
        tensors[0][5] = kNaN;
        tensors[1][700] = kInf;
        tensors[2][701] = -kInf;
        tensors[0][702] = kInf;
        tensors[3][702] = -kInf;
        for (auto& tensor : tensors) tensor[3'000] = -kInf;  // in the block that is not full
        expected[5] = expected[702] = kNaN;
        expected[700] = kInf;
        expected[701] = expected[3'000] = -kInf;
        submit_all(network, tensors);
        REQUIRE(network.run(1));
        for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
            CHECK(network.completions[rank][0].error == WorkerError::None);
            CHECK(same_bits(tensors[rank], expected));
            CHECK(network.workers[rank]->counters().non_finite_blocks == 3);
        }
    }
}

TEST_CASE("worker: a whole tensor that is not finite, behind it the next operation") {
    JobShape shape;
    shape.world_size = 2;
    MemoryNetwork network(shape);
    std::vector<Floats> infinite(2, Floats(5'000, kInf));
    auto next = inputs(2, 300);
    const Floats expected = sum_of(next);
    submit_all(network, infinite);
    submit_all(network, next);
    REQUIRE(network.run(2));
    for (std::uint32_t rank = 0; rank < 2; ++rank) {
        CHECK(infinite[rank] == Floats(5'000, kInf));
        CHECK(same_bits(next[rank], expected));
    }
}

TEST_CASE("worker: many operations in flight, empty ones among them") {
    JobShape shape;
    shape.slots = 16;
    shape.faults = {0.02, 0.02, 20, 500};
    MemoryNetwork network(shape);
    constexpr std::size_t kOperations = 60;
    std::vector<std::vector<Floats>> operations;
    std::vector<Floats> expected;
    for (std::size_t k = 0; k < kOperations; ++k) {
        operations.push_back(inputs(shape.world_size, k % 7 == 0 ? 0 : 37 * k));
        expected.push_back(sum_of(operations.back()));
    }
    for (auto& tensors : operations) submit_all(network, tensors);
    REQUIRE(network.workers[0]->take_completion()->operation == 0);  // empty: complete at once
    REQUIRE(network.workers[0]->take_completion()->operation == 7);
    REQUIRE(network.run(kOperations - 9, 20'000'000));
    network.run(kOperations, 20'000'000);
    for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
        CHECK(network.workers[rank]->counters().operations == kOperations);
        for (std::size_t k = 0; k < kOperations; ++k) CHECK(same_bits(operations[k][rank], expected[k]));
    }
}

TEST_CASE("worker: a straggler is waited for, named and hardly disturbed") {
    JobShape shape;
    MemoryNetwork network(shape);
    auto tensors = inputs(shape.world_size, 10'000);
    const Floats expected = sum_of(tensors);
    for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
        network.at(rank == 1 ? 5'000'000 : 0, [&, rank] {
            network.workers[rank]->submit(tensors[rank].data(), tensors[rank].size(), DType::Float32, OpCode::Sum,
                                          network.now_us);
        });
    }
    CHECK_FALSE(network.run(1, 4'900'000));
    CHECK(network.workers[0]->awaited_ranks() == std::vector<std::uint32_t>{1});
    CHECK(network.the_switch.awaited_ranks(MemoryNetwork::kJob) == std::vector<std::uint32_t>{1});
    CHECK(network.workers[0]->counters().pendings > 0);
    CHECK(network.workers[0]->counters().timer_retransmits < 40);
    REQUIRE(network.run(1));
    for (const Floats& tensor : tensors) CHECK(same_bits(tensor, expected));
    CHECK(network.workers[0]->awaited_ranks().empty());
}

TEST_CASE("worker: a rank that never comes ends in an error that names it") {
    JobShape shape;
    shape.straggler_timeout_us = 3'000'000;
    MemoryNetwork network(shape);
    auto tensors = inputs(shape.world_size, 1'000);
    const auto before = tensors;
    for (int repeat = 0; repeat < 2; ++repeat) {
        for (const std::uint32_t rank : {0u, 1u, 3u}) {
            network.workers[rank]->submit(tensors[rank].data(), 1'000, DType::Float32, OpCode::Sum, 0);
        }
    }
    CHECK_FALSE(network.run(2, 20'000'000));
    for (const std::uint32_t rank : {0u, 1u, 3u}) {
        REQUIRE(network.completions[rank].size() == 2);
        CHECK(network.completions[rank][0].error == WorkerError::PeersMissing);
        CHECK(network.completions[rank][0].missing_ranks == std::vector<std::uint32_t>{2});
        CHECK(network.completions[rank][1].error == WorkerError::Aborted);
        CHECK(network.workers[rank]->failed());
        CHECK(network.workers[rank]->outstanding() == 0);
        CHECK_FALSE(network.workers[rank]->next_deadline_us().has_value());
        CHECK(same_bits(tensors[rank], before[rank]));  // no result came: the input is still there
    }
    network.workers[0]->submit(tensors[0].data(), 1'000, DType::Float32, OpCode::Sum, network.now_us);
    CHECK(network.workers[0]->take_completion()->error == WorkerError::Aborted);
}

TEST_CASE("worker: a switch that falls silent ends in an error, and half a result is no result") {
    JobShape shape;
    MemoryNetwork network(shape);
    auto tensors = inputs(shape.world_size, 50'000);
    network.cut = [&network](std::uint32_t) { return network.now_us > 1'000; };
    submit_all(network, tensors);
    REQUIRE(network.run(1));
    CHECK(network.now_us < 7'000'000);
    for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
        CHECK(network.completions[rank][0].error == WorkerError::SwitchSilent);
        CHECK(network.workers[rank]->counters().results > shape.slots);
        for (const float x : tensors[rank]) REQUIRE(std::isnan(x));
    }
}

TEST_CASE("worker: a damaged result fails the rank that got it, and only that one") {
    JobShape shape;
    shape.slots = 32;  // the whole operation fits into the window: the other ranks lack nothing
    const std::size_t payload = exponents_bytes(shape.chunk_elems);
    struct Damage {
        std::size_t position;
        std::uint8_t flip;
        WorkerError expected;
    };
    for (const Damage& damage : {Damage{payload + 403, 0x01, WorkerError::Integrity},  // the least bit of an element
                                 Damage{payload, 0x40, WorkerError::Overflow}}) {
        MemoryNetwork network(shape);
        int payloads = 0;
        network.tamper = [&](std::uint32_t rank, Bytes& datagram) {
            if (rank == 2 && datagram.size() > payload && ++payloads == 3) datagram[damage.position] ^= damage.flip;
            return true;
        };
        auto tensors = inputs(shape.world_size, 2'000);
        const Floats expected = sum_of(tensors);
        submit_all(network, tensors);
        REQUIRE(network.run(1));
        for (const std::uint32_t rank : {0u, 1u, 3u}) {
            CHECK(network.completions[rank][0].error == WorkerError::None);
            CHECK(same_bits(tensors[rank], expected));
        }
        CHECK(network.completions[2][0].error == damage.expected);
        CHECK_FALSE(network.completions[2][0].detail.empty());
        for (const float x : tensors[2]) REQUIRE(std::isnan(x));
    }
}

TEST_CASE("worker: exponents that are not everybody's are found") {
    for (const std::uint8_t flip : {0x80, 0x10}) {  // e0 = 9 of one block becomes -119, or 25
        CAPTURE(int{flip});
        JobShape shape;
        shape.straggler_timeout_us = 2'000'000;
        MemoryNetwork network(shape);
        bool flipped = false;
        network.tamper = [&](std::uint32_t rank, Bytes& datagram) {
            if (rank == 2 && !std::exchange(flipped, true)) datagram[kHeaderBytes] ^= flip;
            return true;
        };
        auto tensors = inputs(shape.world_size, 2'000);
        submit_all(network, tensors);
        REQUIRE(network.run(1));
        CHECK(network.completions[2][0].error == WorkerError::Integrity);
        const Completion& of_another = network.completions[0][0];
        if (flip == 0x80) {  // rank 2 knows at once and sends no more
            CHECK(of_another.error == WorkerError::PeersMissing);
            CHECK(of_another.missing_ranks == std::vector<std::uint32_t>{2});
        } else {
            CHECK(of_another.error == WorkerError::Integrity);
        }
    }
}

TEST_CASE("worker: ranks that disagree on the size get no result") {
    JobShape shape;
    MemoryNetwork network(shape);
    auto tensors = inputs(shape.world_size, 1'001);
    for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
        network.workers[rank]->submit(tensors[rank].data(), rank == 3 ? 1'001 : 1'000, DType::Float32, OpCode::Sum, 0);
    }
    REQUIRE(network.run(1));
    for (const auto& of_rank : network.completions) CHECK(of_rank[0].error == WorkerError::Integrity);
}

TEST_CASE("worker: what is not an answer to something outstanding is dropped under its reason") {
    JobShape shape;
    shape.world_size = 1;
    shape.slots = 4;
    MemoryNetwork network(shape);
    std::vector<Bytes> results;
    network.tamper = [&results](std::uint32_t, Bytes& datagram) {
        results.push_back(datagram);
        return true;
    };
    auto tensors = inputs(1, 3'000);
    submit_all(network, tensors);
    REQUIRE(network.run(1));
    const Floats result = tensors[0];
    WorkerMachine& worker = *network.workers[0];
    const Bytes last = results.back();
    const auto dropped_as = [&](WorkerDrop reason, const Bytes& datagram) {
        CAPTURE(static_cast<int>(reason));
        const std::uint64_t before = drops(worker, reason);
        worker.handle(datagram, network.now_us);
        CHECK(drops(worker, reason) == before + 1);
    };
    const auto with = [&last](std::size_t position, std::uint8_t flip) {
        Bytes bad = last;
        bad[position] ^= flip;
        return bad;
    };
    dropped_as(WorkerDrop::TooShort, Bytes(last.begin(), last.begin() + 7));
    dropped_as(WorkerDrop::TooShort, {});
    dropped_as(WorkerDrop::BadType, with(0, 0x40));  // PROBE
    dropped_as(WorkerDrop::WrongJob, with(1, 1));
    dropped_as(WorkerDrop::BadSizeCode, with(0, 2));
    dropped_as(WorkerDrop::BadLength, Bytes(last.begin(), last.end() - 1));
    dropped_as(WorkerDrop::StaleEpoch, with(2, 1));
    dropped_as(WorkerDrop::BadSlot, with(7, 1));
    dropped_as(WorkerDrop::BadSlot, with(6, 0x80));
    dropped_as(WorkerDrop::BadSlot, with(6, 0x40));
    dropped_as(WorkerDrop::DuplicateResult, last);
    dropped_as(WorkerDrop::StaleNumber, results.front());
    Bytes pending(last.begin(), last.begin() + kHeaderBytes + 1);
    pending[0] = static_cast<std::uint8_t>(static_cast<int>(MsgType::Pending) << 4 | (pending[0] & 7));
    dropped_as(WorkerDrop::DuplicateResult, pending);
    CHECK(same_bits(tensors[0], result));
}

TEST_CASE("worker: abort fails what is unfinished, once") {
    JobShape shape;
    shape.world_size = 2;
    MemoryNetwork network(shape);
    auto tensors = inputs(2, 1'000);
    network.workers[0]->submit(tensors[0].data(), 1'000, DType::Float32, OpCode::Sum, 0);
    CHECK_FALSE(network.run(1, 1'000));
    CHECK(network.workers[0]->outstanding() > 0);
    network.workers[0]->abort("rank 1 gave up");
    network.workers[0]->abort("again");
    const auto completion = network.workers[0]->take_completion();
    REQUIRE(completion.has_value());
    CHECK(completion->error == WorkerError::Aborted);
    CHECK(completion->detail == "rank 1 gave up");
    CHECK_FALSE(network.workers[0]->take_completion().has_value());
    CHECK(std::string(error_name(completion->error)) == "aborted");
}

TEST_CASE("worker: configurations that break the rules are refused") {
    const auto refused = [](auto change) {
        WorkerConfig config;
        config.slots = 8;
        config.chunk_elems = 256;
        change(config);
        CHECK_THROWS_AS(WorkerMachine{config}, std::invalid_argument);
    };
    refused([](auto& c) { c.slots = 0; });
    refused([](auto& c) { c.slots = 24; });
    refused([](auto& c) { c.slot_base = 0x7FF9; });
    refused([](auto& c) { c.chunk_elems = 100; });
    refused([](auto& c) { c.rank = 1; });
    refused([](auto& c) { c.first_number = 8; });
}
