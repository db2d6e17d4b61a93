#include <doctest/doctest.h>

#include <vector>

#include "netsum/window.hpp"

using namespace netsum;

namespace {

using Slots = std::vector<std::uint32_t>;

constexpr std::uint32_t kSlots = 8;

WindowConfig config() {
    return {kSlots, 10, 50'000, 5'000, 1'000'000, 5'000'000, 30'000'000};
}

Slots list(std::span<const std::uint32_t> slots) {
    return {slots.begin(), slots.end()};
}

// A window with all slots sent at time 0.
Window full() {
    Window window(config());
    for (std::uint32_t slot = 0; slot < kSlots; ++slot) window.sent(slot, slot, 0);
    return window;
}

}  // namespace

TEST_CASE("rto: RFC 6298 in integers, between its bounds") {
    RttEstimator rtt(50'000, 5'000, 1'000'000);
    CHECK(rtt.rto_us() == 50'000);
    CHECK(rtt.srtt_us() == 0);
    rtt.sample(10'000);
    CHECK(rtt.srtt_us() == 10'000);
    CHECK(rtt.rto_us() == 30'000);  // 10000 + 4 * 5000
    rtt.sample(18'000);             // rttvar (15000 + 8000) / 4, srtt (70000 + 18000) / 8
    CHECK(rtt.srtt_us() == 11'000);
    CHECK(rtt.rto_us() == 34'000);
    rtt.sample(2'000'000);
    CHECK(rtt.rto_us() == 125'000);  // an eighth of max_rto_us
    RttEstimator fast(50'000, 5'000, 1'000'000);
    fast.sample(100);
    CHECK(fast.rto_us() == 5'000);
}

TEST_CASE("window: a packet that half a window overtook is sent again, once") {
    Window window = full();
    window.answered(1, 100);
    window.answered(2, 100);
    window.answered(3, 100);
    CHECK(window.fast_retransmits(100).empty());
    window.answered(4, 100);
    CHECK(list(window.fast_retransmits(100)) == Slots{0});
    CHECK(window.fast_retransmits(100).empty());
    window.answered(6, 150);
    CHECK(window.fast_retransmits(150).empty());  // the first in order is slot 5 now
    CHECK(window.number_at(0) == 0);
    CHECK_FALSE(window.number_at(1).has_value());
}

TEST_CASE("window: each resend doubles what must overtake the next") {
    Window window(config());
    window.sent(0, 0, 0);
    std::uint64_t number = 1;
    Slots resent_after;  // transmissions answered between two resends
    for (std::uint32_t answered = 0; resent_after.size() < 4;) {
        window.sent(1, number++, 0);
        window.answered(1, 10);
        ++answered;
        if (!window.fast_retransmits(10).empty()) {
            resent_after.push_back(answered);
            answered = 0;
        }
    }
    CHECK(resent_after == Slots{4, 8, 16, 32});
}

TEST_CASE("window: the timer backs off while nothing comes, and repairs a burst like a slow start") {
    Window window = full();
    CHECK(window.next_deadline_us() == 50'000);
    CHECK(window.timer_retransmits(49'999).empty());
    CHECK(list(window.timer_retransmits(50'000)) == Slots{0, 1, 2, 3});
    CHECK(window.next_deadline_us() == 150'000);  // 50000 + 2 * rto
    CHECK(list(window.timer_retransmits(150'000)) == Slots{4, 5, 6, 7});
    CHECK(window.next_deadline_us() == 350'000);
    window.answered(0, 160'000);  // resent: no sample
    CHECK(window.rtt().srtt_us() == 0);
    CHECK(list(window.timer_retransmits(200'000)) == Slots{1, 2, 3, 4});  // a result came: the next burst is doubled
    window.answered(5, 200'000);
    CHECK(list(window.timer_retransmits(250'000)) == Slots{6, 7, 1, 2, 3, 4});
}

TEST_CASE("window: a straggler costs one probe a tick") {
    Window window = full();
    const std::uint8_t bitmap[] = {0b0000'0100, 0b10};
    window.pending(bitmap, 10'000);
    CHECK(window.waiting_for() == Slots{2, 9});
    CHECK(list(window.timer_retransmits(50'000)) == Slots{0});
    int probes = 0;
    std::int64_t now_us = 50'000;
    for (; now_us < 20'000'000; now_us = *window.next_deadline_us()) {
        window.pending(bitmap, now_us);
        probes += static_cast<int>(window.timer_retransmits(now_us).size());
    }
    CHECK(probes <= 30);  // rto * 2^backoff grows to 0.8 s
    window.answered(0, now_us);
    CHECK(window.waiting_for().empty());
}

TEST_CASE("window: two deadlines, from the moment it became non-empty") {
    Window window(config());
    CHECK_FALSE(window.overdue(100'000'000).has_value());
    CHECK_FALSE(window.next_deadline_us().has_value());
    window.sent(0, 0, 100'000'000);
    CHECK_FALSE(window.overdue(104'999'999).has_value());
    CHECK(window.overdue(105'000'000) == Overdue::SwitchSilent);
    const std::uint8_t bitmap[] = {1, 0};
    for (std::int64_t now_us = 104'000'000; now_us < 130'000'000; now_us += 4'000'000) window.pending(bitmap, now_us);
    CHECK_FALSE(window.overdue(129'999'999).has_value());
    CHECK(window.overdue(130'000'000) == Overdue::PeersMissing);
    window.clear();
    CHECK(window.size() == 0);
    CHECK_FALSE(window.overdue(200'000'000).has_value());
}
