// What a worker has outstanding, and when to send it again (protocol/SPEC.md section 5).
// Knows slots, numbers and times; knows nothing of tensors, packets' contents or sockets.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "netsum/rto.hpp"

namespace netsum {

struct WindowConfig {
    std::uint32_t slots = 0;
    std::uint32_t world_size = 1;
    std::int64_t initial_rto_us = 0;
    std::int64_t min_rto_us = 0;
    std::int64_t max_rto_us = 0;
    std::int64_t network_timeout_us = 0;
    std::int64_t straggler_timeout_us = 0;
};

enum class Overdue : std::uint8_t { SwitchSilent, PeersMissing };

// Outstanding packets of a job, at most one for each slot, linked in the order of their last transmission (`send_no`).
// All memory is allocated by the constructor; sending and answering cost O(1).
class Window {
  public:
    explicit Window(const WindowConfig& config);

    // The running number outstanding in `slot`, not reduced.
    std::optional<std::uint64_t> number_at(std::uint32_t slot) const {
        return entries_[slot].outstanding ? std::optional(entries_[slot].number) : std::nullopt;
    }
    void sent(std::uint32_t slot, std::uint64_t number, std::int64_t now_us);  // a first transmission; the slot is free
    void answered(std::uint32_t slot, std::int64_t now_us);  // the result for what is outstanding in `slot` is in
    // The switch has our contribution and waits for others. `bitmap`: ceil(world_size / 8) bytes, bit r set when rank r
    // is missing.
    void pending(const std::uint8_t* bitmap, std::int64_t now_us);

    std::optional<Overdue> overdue(std::int64_t now_us) const;  // the deadline that has passed, if one has

    // Slots to resend now, marked as sent: because results of packets sent later have overtaken them, or because the
    // timer is due. Valid until the next call of either.
    std::span<const std::uint32_t> fast_retransmits(std::int64_t now_us);
    std::span<const std::uint32_t> timer_retransmits(std::int64_t now_us);

    // When overdue() or timer_retransmits() may have something to say; none when nothing is outstanding.
    std::optional<std::int64_t> next_deadline_us() const;

    void clear();  // nothing is outstanding any more: whatever still arrives is stale

    std::uint32_t size() const { return size_; }
    const RttEstimator& rtt() const { return rtt_; }
    std::vector<std::uint32_t> waiting_for() const;  // ranks of the last PENDING since the last result

  private:
    struct Entry {
        std::uint64_t number = 0;
        std::int64_t last_sent_us = 0;
        std::uint64_t send_no = 0;  // place of its last transmission in the order of all, from 1
        std::uint32_t resends = 0;
        std::uint32_t previous = 0;  // neighbours in the order of send_no, slots or kNone
        std::uint32_t next = 0;
        bool outstanding = false;
    };

    void append(std::uint32_t slot, std::int64_t now_us);  // gives it the next send_no
    void unlink(std::uint32_t slot);
    void resend(std::uint32_t slot, std::int64_t now_us);
    std::int64_t timer_us() const;

    WindowConfig config_;
    RttEstimator rtt_;
    std::vector<Entry> entries_;            // by slot
    std::vector<std::uint32_t> to_resend_;  // answer of the last call
    std::vector<std::uint8_t> missing_;     // bitmap of the last PENDING
    std::uint32_t first_;                   // slots at the ends of the order, or kNone
    std::uint32_t last_;
    std::uint32_t size_ = 0;
    std::uint32_t burst_;              // most packets a timer tick resends
    std::uint64_t reorder_threshold_;  // transmissions that must be overtaken before a packet counts as lost
    std::uint64_t send_no_ = 0;
    std::uint64_t highest_answered_ = 0;  // send_no
    std::int64_t last_tick_us_ = 0;
    std::int64_t heard_us_ = 0;     // last result or PENDING
    std::int64_t progress_us_ = 0;  // last result
    unsigned backoff_ = 0;          // doublings of the timer
    bool progress_since_tick_ = false;
    bool is_waiting_ = false;  // a PENDING came since the last result
};

}  // namespace netsum
