#include <doctest/doctest.h>

#include <algorithm>
#include <map>
#include <stdexcept>
#include <vector>

#include "netsum/faults.hpp"

using namespace netsum;

namespace {

using Bytes = std::vector<std::uint8_t>;
const Address kPeer{0x7F000001, 9};

// `count` datagrams, one each `step_us`, numbered in their first two bytes. What comes out, in order.
std::vector<Bytes> pass(FaultInjector& faults, int count, std::int64_t step_us = 100) {
    std::vector<Bytes> out;
    const FaultInjector::Deliver deliver = [&](std::span<const std::uint8_t> datagram, const Address& peer) {
        CHECK(peer == kPeer);
        out.emplace_back(datagram.begin(), datagram.end());
    };
    std::int64_t now_us = 0;
    for (int i = 0; i < count; ++i, now_us += step_us) {
        Bytes datagram(50, 7);
        datagram[0] = static_cast<std::uint8_t>(i >> 8);
        datagram[1] = static_cast<std::uint8_t>(i);
        faults.offer(datagram, kPeer, now_us, deliver);
        faults.release_due(now_us, deliver);
        faults.recycle();
    }
    while (const auto due_us = faults.next_due_us()) faults.release_due(*due_us, deliver);
    faults.recycle();
    return out;
}

int number_of(const Bytes& datagram) {
    return datagram[0] << 8 | datagram[1];
}

}  // namespace

TEST_CASE("no faults: everything, at once, uncopied") {
    FaultInjector faults({.seed = 1});
    const Bytes datagram(10, 3);
    const std::uint8_t* seen = nullptr;
    faults.offer(datagram, kPeer, 0,
                 [&](std::span<const std::uint8_t> delivered, const Address&) { seen = delivered.data(); });
    CHECK(seen == datagram.data());
    CHECK_FALSE(faults.next_due_us());
}

TEST_CASE("the same seed and datagrams give the same faults, another seed others") {
    const FaultConfig config{.seed = 5, .loss = 0.1, .duplicate = 0.1, .reorder = 0.1, .corrupt = 0.1};
    FaultInjector first(config);
    FaultInjector again(config);
    FaultConfig other_config = config;
    other_config.seed = 6;
    FaultInjector other(other_config);
    const auto out = pass(first, 2000);
    CHECK(out == pass(again, 2000));
    CHECK(out != pass(other, 2000));
}

TEST_CASE("loss and duplication at the asked rate, each counted") {
    FaultInjector faults({.seed = 2, .loss = 0.2, .duplicate = 0.3});
    const auto out = pass(faults, 10000);
    CHECK(faults.counters().lost > 1800);
    CHECK(faults.counters().lost < 2200);
    CHECK(out.size() == 10000 - faults.counters().lost + faults.counters().duplicated);
    CHECK(faults.counters().duplicated > 2200);
    CHECK(faults.counters().duplicated < 2600);
}

TEST_CASE("everything lost") {
    FaultInjector faults({.seed = 2, .loss = 1.0});
    CHECK(pass(faults, 100).empty());
    CHECK(faults.counters().lost == 100);
}

TEST_CASE("a reordered datagram comes out behind 1 to 16 later ones") {
    FaultInjector faults({.seed = 3, .reorder = 0.05});
    const auto out = pass(faults, 2000);
    REQUIRE(out.size() == 2000);
    CHECK(faults.counters().reordered > 50);
    std::vector<int> numbers;
    for (const Bytes& datagram : out) numbers.push_back(number_of(datagram));
    CHECK_FALSE(std::is_sorted(numbers.begin(), numbers.end()));
    int furthest = 0;
    for (int place = 0; place < 2000; ++place)
        furthest = std::max(furthest, place - numbers[static_cast<std::size_t>(place)]);
    CHECK(furthest >= 8);
    CHECK(furthest <= 16);
    std::sort(numbers.begin(), numbers.end());
    for (int i = 0; i < 2000; ++i) CHECK(numbers[static_cast<std::size_t>(i)] == i);
}

TEST_CASE("a reordered datagram with none behind it comes out after 20 ms") {
    FaultInjector faults({.seed = 3, .reorder = 1.0});
    int delivered = 0;
    const FaultInjector::Deliver deliver = [&](std::span<const std::uint8_t>, const Address&) { ++delivered; };
    const Bytes datagram(10);
    faults.offer(datagram, kPeer, 1000, deliver);
    CHECK(faults.next_due_us() == 21'000);
    faults.release_due(20'999, deliver);
    CHECK(delivered == 0);
    faults.release_due(21'000, deliver);
    CHECK(delivered == 1);
}

TEST_CASE("delays lie in the range") {
    FaultInjector faults({.seed = 4, .delay_min_us = 300, .delay_max_us = 900});
    std::map<int, std::int64_t> sent_us;
    std::int64_t now_us = 0;
    int delivered = 0;
    const FaultInjector::Deliver deliver = [&](std::span<const std::uint8_t> datagram, const Address&) {
        const std::int64_t delay_us = now_us - sent_us[datagram[0]];
        CHECK(delay_us >= 300);
        CHECK(delay_us <= 900);
        ++delivered;
    };
    for (int i = 0; i < 200; ++i) {
        sent_us[i] = now_us;
        faults.offer(Bytes(5, static_cast<std::uint8_t>(i)), kPeer, now_us, deliver);
        for (int step = 0; step < 10; ++step) faults.release_due(++now_us, deliver);
        faults.recycle();
    }
    while (const auto due_us = faults.next_due_us()) {
        now_us = *due_us;
        faults.release_due(now_us, deliver);
    }
    CHECK(delivered == 200);
}

TEST_CASE("corruption flips one bit of the delivered copy and leaves the caller's datagram alone") {
    FaultInjector faults({.seed = 5, .corrupt = 1.0});
    const Bytes original(100, 0xAA);
    for (int i = 0; i < 50; ++i) {
        int flipped = 0;
        faults.offer(original, kPeer, 0, [&](std::span<const std::uint8_t> datagram, const Address&) {
            for (std::size_t j = 0; j < datagram.size(); ++j) flipped += __builtin_popcount(datagram[j] ^ 0xAA);
        });
        CHECK(flipped == 1);
    }
    CHECK(std::all_of(original.begin(), original.end(), [](std::uint8_t byte) { return byte == 0xAA; }));
}

TEST_CASE("what is not a probability or a range is refused") {
    CHECK_THROWS_AS(FaultInjector({.loss = 1.5}), std::invalid_argument);
    CHECK_THROWS_AS(FaultInjector({.corrupt = -0.1}), std::invalid_argument);
    CHECK_THROWS_AS(FaultInjector({.delay_min_us = 5, .delay_max_us = 4}), std::invalid_argument);
}
