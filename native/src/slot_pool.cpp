#include "netsum/slot_pool.hpp"

#include <algorithm>
#include <cstring>

#include "netsum/fixed_point.hpp"

namespace netsum {

namespace {

constexpr std::size_t kCacheLineBytes = 64;

std::uint8_t bit_of(std::uint32_t rank) {
    return static_cast<std::uint8_t>(1u << (rank & 7u));
}

}  // namespace

SlotPool::SlotPool(std::uint32_t slots, std::uint32_t world_size, std::size_t chunk_elems)
    : world_size_(world_size),
      chunk_elems_(chunk_elems),
      seen_bytes_((world_size + 7) / 8),
      stride_bytes_((data_bytes(chunk_elems) + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes),
      aggregators_(2 * std::size_t{slots}),
      seen_(aggregators_.size() * seen_bytes_),
      images_(aggregators_.size() * stride_bytes_) {}

Verdict SlotPool::judge(const Aggregator& aggregator, std::uint32_t number, std::uint8_t kind,
                        std::uint32_t rank) const {
    if (aggregator.count == 0) return Verdict::Claim;
    if (serial_less(aggregator.number, number)) return complete(aggregator) ? Verdict::Claim : Verdict::SlotBusy;
    if (aggregator.number != number) return Verdict::StaleNumber;
    if (aggregator.kind != kind) return Verdict::KindMismatch;
    if (seen(aggregator)[rank / 8] & bit_of(rank)) return complete(aggregator) ? Verdict::Replay : Verdict::Duplicate;
    return Verdict::Add;
}

void SlotPool::claim(Aggregator& aggregator, const Header& header, std::uint32_t rank, const std::uint8_t* datagram) {
    aggregator.number = header.number();
    aggregator.kind = header.msg_type;
    aggregator.count = 1;
    std::memset(seen(aggregator), 0, seen_bytes_);
    seen(aggregator)[rank / 8] = bit_of(rank);
    std::uint8_t* sum = image(aggregator);
    write_header(header, sum);  // not copied: the unused bit goes out as 0
    std::memcpy(sum + kHeaderBytes, datagram + kHeaderBytes, datagram_bytes(header.msg_type) - kHeaderBytes);
}

void SlotPool::add(Aggregator& aggregator, std::uint32_t rank, const std::uint8_t* datagram) {
    std::uint8_t* sum = image(aggregator);
    const std::size_t payload = exponents_bytes(chunk_elems_);
    for (std::size_t i = kHeaderBytes; i < payload; ++i) {
        const auto theirs = static_cast<std::int8_t>(datagram[i]);
        if (theirs > static_cast<std::int8_t>(sum[i])) sum[i] = datagram[i];
    }
    if (aggregator.kind == static_cast<std::uint8_t>(MsgType::Data)) {
        add_wire(sum + payload, datagram + payload, chunk_elems_);
    }
    seen(aggregator)[rank / 8] |= bit_of(rank);
    ++aggregator.count;
}

std::span<const std::uint8_t> SlotPool::result(const Aggregator& aggregator) const {
    return {images_.data() + index_of(aggregator) * stride_bytes_, datagram_bytes(aggregator.kind)};
}

void SlotPool::missing_bitmap(const Aggregator& aggregator, std::uint8_t* bitmap) const {
    for (std::size_t i = 0; i < seen_bytes_; ++i) bitmap[i] = static_cast<std::uint8_t>(~seen(aggregator)[i]);
    if (world_size_ % 8 != 0) bitmap[seen_bytes_ - 1] &= static_cast<std::uint8_t>((1u << (world_size_ % 8)) - 1);
}

std::uint32_t SlotPool::in_use() const {
    return static_cast<std::uint32_t>(
        std::count_if(aggregators_.begin(), aggregators_.end(), [this](const Aggregator& a) { return incomplete(a); }));
}

std::vector<std::uint32_t> SlotPool::awaited_ranks() const {
    const Aggregator* oldest = nullptr;
    for (const Aggregator& a : aggregators_) {
        if (incomplete(a) && (oldest == nullptr || serial_less(a.number, oldest->number))) oldest = &a;
    }
    std::vector<std::uint32_t> ranks;
    if (oldest == nullptr) return ranks;
    for (std::uint32_t rank = 0; rank < world_size_; ++rank) {
        if (!(seen(*oldest)[rank / 8] & bit_of(rank))) ranks.push_back(rank);
    }
    return ranks;
}

}  // namespace netsum
