// Seeded fault injection for one direction of a socket: loss, duplication, reordering, delay, corruption.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <random>
#include <span>
#include <vector>

#include "netsum/address.hpp"

namespace netsum {

struct FaultConfig {
    std::uint64_t seed = 0;
    double loss = 0;  // probabilities, 0..1
    double duplicate = 0;
    double reorder = 0;             // held back behind the next 1..16 datagrams, at most 20 ms
    double corrupt = 0;             // one bit flipped
    std::int64_t delay_min_us = 0;  // each datagram is held for a time drawn evenly from this range
    std::int64_t delay_max_us = 0;

    void check() const;  // throws std::invalid_argument naming the field
};

struct FaultCounters {
    std::uint64_t lost = 0;
    std::uint64_t duplicated = 0;
    std::uint64_t reordered = 0;
    std::uint64_t delayed = 0;
    std::uint64_t corrupted = 0;
};

// What happens to the i-th datagram depends on the seed and i alone; time decides only when a held one is let go.
class FaultInjector {
  public:
    using Deliver = std::function<void(std::span<const std::uint8_t>, const Address&)>;

    explicit FaultInjector(const FaultConfig& config);

    // Takes a datagram to or from `peer`, and delivers it and others now, later, or never. A delivered span is the
    // caller's own or stays valid until recycle().
    void offer(std::span<const std::uint8_t> datagram, const Address& peer, std::int64_t now_us,
               const Deliver& deliver);
    void release_due(std::int64_t now_us, const Deliver& deliver);  // the held ones whose time has come
    std::optional<std::int64_t> next_due_us() const;
    void recycle();  // everything delivered so far has been used

    const FaultCounters& counters() const { return counters_; }

  private:
    struct Held {
        std::vector<std::uint8_t> datagram;
        Address peer;
        std::int64_t due_us;
        std::uint64_t due_index;  // let go, if reordered, when so many datagrams have been offered
        std::uint64_t order;
    };
    double draw();  // 0 <= x < 1
    std::vector<std::uint8_t> copy(std::span<const std::uint8_t> datagram);
    template <typename Ready>
    void release(Ready&& ready, const Deliver& deliver);

    FaultConfig config_;
    std::mt19937_64 random_;
    FaultCounters counters_;
    std::uint64_t offered_ = 0;
    std::uint64_t held_so_far_ = 0;
    std::vector<Held> held_;
    std::vector<std::vector<std::uint8_t>> delivered_;  // copies in use until recycle()
    std::vector<std::vector<std::uint8_t>> spare_;
};

}  // namespace netsum
