// Aggregator slots in two versions (protocol/SPEC.md section 4): the state that the switch keeps for one job.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "netsum/wire.hpp"

namespace netsum {

// What is to be done with a contribution. The last three are drop reasons.
enum class Verdict : std::uint8_t { Claim, Add, Replay, Duplicate, SlotBusy, StaleNumber, KindMismatch };

// One (slot, version).
struct Aggregator {
    std::uint32_t number = 0;   // 24 bits; meaningful once claimed
    std::uint32_t count = 0;    // workers that contributed; 0 until the first claim
    std::uint8_t kind = 0;      // msg_type of the contributions
    std::uint64_t emitted = 0;  // the owner's mark: when its result was last handed out
};

// Invariants: `count` is the number of bits set; a result never changes between completion and the next claim; a claim
// never discards an incomplete sum. All memory is allocated by the constructor.
class SlotPool {
  public:
    SlotPool(std::uint32_t slots, std::uint32_t world_size, std::size_t chunk_elems);

    Aggregator& at(std::uint32_t slot, unsigned version) { return aggregators_[2 * slot + version]; }

    // What SPEC.md says of a contribution; changes nothing.
    Verdict judge(const Aggregator& aggregator, std::uint32_t number, std::uint8_t kind, std::uint32_t rank) const;
    // Carries out Verdict::Claim and Verdict::Add. `datagram`: header, exponents and, for DATA, payload; checked by the
    // caller.
    void claim(Aggregator& aggregator, const Header& header, std::uint32_t rank, const std::uint8_t* datagram);
    void add(Aggregator& aggregator, std::uint32_t rank, const std::uint8_t* datagram);

    bool complete(const Aggregator& aggregator) const { return aggregator.count == world_size_; }
    // The datagram of the result, in place.
    std::span<const std::uint8_t> result(const Aggregator& aggregator) const;
    // Body of a PENDING, ceil(world_size / 8) bytes: bit r, least significant first, set when rank r is missing.
    void missing_bitmap(const Aggregator& aggregator, std::uint8_t* bitmap) const;

    std::uint32_t in_use() const;  // claimed and incomplete
    std::vector<std::uint32_t> awaited_ranks()
        const;  // missing from the oldest incomplete aggregator (the one with the smallest number)

  private:
    std::size_t index_of(const Aggregator& aggregator) const {
        return static_cast<std::size_t>(&aggregator - aggregators_.data());
    }
    std::uint8_t* seen(const Aggregator& aggregator) { return seen_.data() + index_of(aggregator) * seen_bytes_; }
    const std::uint8_t* seen(const Aggregator& aggregator) const {
        return seen_.data() + index_of(aggregator) * seen_bytes_;
    }
    std::uint8_t* image(const Aggregator& aggregator) { return images_.data() + index_of(aggregator) * stride_bytes_; }
    std::size_t datagram_bytes(std::uint8_t kind) const {
        return kind == static_cast<std::uint8_t>(MsgType::Data) ? data_bytes(chunk_elems_)
                                                                : exponents_bytes(chunk_elems_);
    }
    bool incomplete(const Aggregator& aggregator) const { return aggregator.count > 0 && !complete(aggregator); }

    std::uint32_t world_size_;
    std::size_t chunk_elems_;
    std::size_t seen_bytes_;    // for each aggregator
    std::size_t stride_bytes_;  // from image to image: DATA, rounded up to a cache line
    std::vector<Aggregator> aggregators_;
    std::vector<std::uint8_t> seen_;    // bit r of an aggregator: rank r has contributed
    std::vector<std::uint8_t> images_;  // running sums as they go on the wire
};

}  // namespace netsum
