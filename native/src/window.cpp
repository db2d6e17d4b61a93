#include "netsum/window.hpp"

#include <algorithm>

namespace netsum {

namespace {

constexpr std::uint32_t kNone = UINT32_MAX;
constexpr std::uint32_t kMaxDoublings = 6;
constexpr std::uint32_t kFirstBurst = 4;

}  // namespace

Window::Window(const WindowConfig& config)
    : config_(config),
      rtt_(config.initial_rto_us, config.min_rto_us, config.max_rto_us),
      entries_(config.slots),
      missing_((config.world_size + 7) / 8),
      first_(kNone),
      last_(kNone),
      burst_(kFirstBurst),
      reorder_threshold_(std::max<std::uint64_t>(3, config.slots / 2)) {
    to_resend_.reserve(config.slots);
}

void Window::append(std::uint32_t slot, std::int64_t now_us) {
    Entry& entry = entries_[slot];
    entry.send_no = ++send_no_;
    entry.last_sent_us = now_us;
    entry.previous = last_;
    entry.next = kNone;
    (last_ == kNone ? first_ : entries_[last_].next) = slot;
    last_ = slot;
}

void Window::unlink(std::uint32_t slot) {
    const Entry& entry = entries_[slot];
    (entry.previous == kNone ? first_ : entries_[entry.previous].next) = entry.next;
    (entry.next == kNone ? last_ : entries_[entry.next].previous) = entry.previous;
}

void Window::sent(std::uint32_t slot, std::uint64_t number, std::int64_t now_us) {
    if (size_ == 0) heard_us_ = progress_us_ = now_us;
    Entry& entry = entries_[slot];
    entry.number = number;
    entry.resends = 0;
    entry.outstanding = true;
    ++size_;
    append(slot, now_us);
}

void Window::answered(std::uint32_t slot, std::int64_t now_us) {
    Entry& entry = entries_[slot];
    unlink(slot);
    entry.outstanding = false;
    --size_;
    if (entry.resends == 0) {
        rtt_.sample(now_us - entry.last_sent_us);
        highest_answered_ = std::max(highest_answered_, entry.send_no);
    }
    heard_us_ = progress_us_ = now_us;
    progress_since_tick_ = true;
    backoff_ = 0;
    is_waiting_ = false;
}

void Window::pending(const std::uint8_t* bitmap, std::int64_t now_us) {
    heard_us_ = now_us;
    is_waiting_ = true;
    std::copy_n(bitmap, missing_.size(), missing_.begin());
}

std::vector<std::uint32_t> Window::waiting_for() const {
    std::vector<std::uint32_t> ranks;
    if (!is_waiting_) return ranks;
    for (std::uint32_t rank = 0; rank < config_.world_size; ++rank) {
        if (missing_[rank / 8] >> (rank % 8) & 1) ranks.push_back(rank);
    }
    return ranks;
}

std::optional<Overdue> Window::overdue(std::int64_t now_us) const {
    if (size_ == 0) return std::nullopt;
    if (now_us - heard_us_ >= config_.network_timeout_us) return Overdue::SwitchSilent;
    if (now_us - progress_us_ >= config_.straggler_timeout_us) return Overdue::PeersMissing;
    return std::nullopt;
}

void Window::resend(std::uint32_t slot, std::int64_t now_us) {
    unlink(slot);
    append(slot, now_us);
    ++entries_[slot].resends;
}

std::span<const std::uint32_t> Window::fast_retransmits(std::int64_t now_us) {
    to_resend_.clear();
    for (std::uint32_t slot = first_; slot != kNone; slot = entries_[slot].next) {
        const Entry& entry = entries_[slot];
        if (entry.send_no + reorder_threshold_ > highest_answered_) break;
        const std::uint64_t threshold = reorder_threshold_ << std::min(entry.resends, kMaxDoublings);
        if (entry.send_no + threshold <= highest_answered_) to_resend_.push_back(slot);
    }
    for (const std::uint32_t slot : to_resend_) resend(slot, now_us);
    return to_resend_;
}

std::span<const std::uint32_t> Window::timer_retransmits(std::int64_t now_us) {
    to_resend_.clear();
    if (size_ == 0 || now_us < timer_us()) return to_resend_;
    // While others are waited for, one probe is enough: a straggler is not a loss.
    const std::uint32_t limit = is_waiting_ ? 1 : burst_;
    for (std::uint32_t slot = first_; slot != kNone && to_resend_.size() < limit; slot = entries_[slot].next) {
        if (entries_[slot].last_sent_us + rtt_.rto_us() > now_us) break;
        to_resend_.push_back(slot);
    }
    for (const std::uint32_t slot : to_resend_) resend(slot, now_us);
    last_tick_us_ = now_us;
    if (progress_since_tick_) {
        burst_ = std::min(2 * burst_, config_.slots);
    } else {
        burst_ = kFirstBurst;
        if (rtt_.rto_us() << (backoff_ + 1) <= config_.max_rto_us) ++backoff_;
    }
    progress_since_tick_ = false;
    return to_resend_;
}

void Window::clear() {
    for (Entry& entry : entries_) entry.outstanding = false;
    first_ = last_ = kNone;
    size_ = 0;
}

std::int64_t Window::timer_us() const {
    const std::int64_t rto_us = rtt_.rto_us();
    return std::max(entries_[first_].last_sent_us + rto_us, last_tick_us_ + (rto_us << backoff_));
}

std::optional<std::int64_t> Window::next_deadline_us() const {
    if (size_ == 0) return std::nullopt;
    return std::min({timer_us(), heard_us_ + config_.network_timeout_us, progress_us_ + config_.straggler_timeout_us});
}

}  // namespace netsum
