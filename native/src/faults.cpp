#include "netsum/faults.hpp"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <string>
#include <utility>

namespace netsum {

namespace {

constexpr std::int64_t kReorderLimitUs = 20'000;
constexpr std::uint64_t kReorderDistance = 16;
constexpr std::uint64_t kNever = std::numeric_limits<std::uint64_t>::max();

void check_probability(double value, const char* name) {
    if (!(value >= 0.0 && value <= 1.0))
        throw std::invalid_argument(std::string(name) + " is " + std::to_string(value) + ", not a probability 0..1");
}

}  // namespace

void FaultConfig::check() const {
    check_probability(loss, "loss");
    check_probability(duplicate, "duplicate");
    check_probability(reorder, "reorder");
    check_probability(corrupt, "corrupt");
    if (delay_min_us < 0 || delay_max_us < delay_min_us) {
        throw std::invalid_argument("delay " + std::to_string(delay_min_us) + ".." + std::to_string(delay_max_us) +
                                    " us is not a range");
    }
}

FaultInjector::FaultInjector(const FaultConfig& config) : config_(config), random_(config.seed) {
    config_.check();
}

double FaultInjector::draw() {
    return static_cast<double>(random_() >> 11) * 0x1p-53;
}

std::vector<std::uint8_t> FaultInjector::copy(std::span<const std::uint8_t> datagram) {
    std::vector<std::uint8_t> buffer;
    if (!spare_.empty()) {
        buffer = std::move(spare_.back());
        spare_.pop_back();
    }
    buffer.assign(datagram.begin(), datagram.end());
    return buffer;
}

void FaultInjector::offer(std::span<const std::uint8_t> datagram, const Address& peer, std::int64_t now_us,
                          const Deliver& deliver) {
    ++offered_;
    // Always the same number of draws, so that one datagram's fate does not shift those of the following ones.
    const bool lose = draw() < config_.loss;
    const bool duplicate = draw() < config_.duplicate;
    const bool reorder = draw() < config_.reorder;
    const bool corrupt = draw() < config_.corrupt;
    const auto distance = 1 + static_cast<std::uint64_t>(draw() * kReorderDistance);
    const auto delay_us =
        config_.delay_min_us +
        static_cast<std::int64_t>(draw() * static_cast<double>(config_.delay_max_us - config_.delay_min_us + 1));
    const double bit = draw();

    if (lose) {
        ++counters_.lost;
    } else {
        if (corrupt && !datagram.empty()) {
            ++counters_.corrupted;
            delivered_.push_back(copy(datagram));
            const auto position = static_cast<std::size_t>(bit * static_cast<double>(datagram.size() * 8));
            delivered_.back()[position / 8] ^= static_cast<std::uint8_t>(1u << (position % 8));
            datagram = delivered_.back();
        }
        counters_.duplicated += duplicate;
        counters_.reordered += reorder;
        counters_.delayed += delay_us > 0;
        for (int copies = duplicate ? 2 : 1; copies > 0; --copies) {
            if (!reorder && delay_us == 0) {
                deliver(datagram, peer);
            } else {
                const std::int64_t due_us = now_us + delay_us + (reorder ? kReorderLimitUs : 0);
                held_.push_back({copy(datagram), peer, due_us, reorder && delay_us == 0 ? offered_ + distance : kNever,
                                 held_so_far_++});
            }
        }
    }
    const std::uint64_t offered = offered_;
    release([offered](const Held& held) { return held.due_index <= offered; }, deliver);
}

void FaultInjector::release_due(std::int64_t now_us, const Deliver& deliver) {
    release([now_us](const Held& held) { return held.due_us <= now_us; }, deliver);
}

template <typename Ready>
void FaultInjector::release(Ready&& ready, const Deliver& deliver) {
    if (held_.empty()) return;
    const auto due = std::stable_partition(held_.begin(), held_.end(), [&](const Held& held) { return !ready(held); });
    if (due == held_.end()) return;
    std::sort(due, held_.end(),
              [](const Held& a, const Held& b) { return std::pair(a.due_us, a.order) < std::pair(b.due_us, b.order); });
    for (auto held = due; held != held_.end(); ++held) {
        delivered_.push_back(std::move(held->datagram));
        deliver(delivered_.back(), held->peer);
    }
    held_.erase(due, held_.end());
}

std::optional<std::int64_t> FaultInjector::next_due_us() const {
    if (held_.empty()) return std::nullopt;
    return std::min_element(held_.begin(), held_.end(),
                            [](const Held& a, const Held& b) { return a.due_us < b.due_us; })
        ->due_us;
}

void FaultInjector::recycle() {
    for (auto& buffer : delivered_) spare_.push_back(std::move(buffer));
    delivered_.clear();
}

}  // namespace netsum
