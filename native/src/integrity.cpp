#include "netsum/integrity.hpp"

namespace netsum {

namespace {

constexpr std::uint32_t kExponentWeight = 0x9E3779B1u;
constexpr std::uint32_t kCrc32Polynomial = 0xEDB88320u;  // of IEEE 802.3, bits reversed: zlib's

// Bit by bit: it runs over 18 bytes, once for each operation.
class Crc32 {
  public:
    template <typename T>
    Crc32& update(T value) {  // big-endian
        for (int shift = 8 * static_cast<int>(sizeof value) - 8; shift >= 0; shift -= 8) {
            state_ ^= static_cast<std::uint8_t>(value >> shift);
            for (int bit = 0; bit < 8; ++bit) state_ = state_ >> 1 ^ (state_ & 1 ? kCrc32Polynomial : 0);
        }
        return *this;
    }
    std::uint32_t value() const { return ~state_; }

  private:
    std::uint32_t state_ = ~0u;
};

}  // namespace

std::uint32_t description_crc(std::uint64_t index, std::uint64_t numel, DType dtype, OpCode op) {
    return Crc32()
        .update(index)
        .update(numel)
        .update(static_cast<std::uint8_t>(dtype))
        .update(static_cast<std::uint8_t>(op))
        .value();
}

void IntegritySums::add_exponents(std::size_t group, std::uint64_t block, ExponentPair agreed) {
    const auto weight = static_cast<std::uint32_t>(2 * block + 1) * kExponentWeight;
    const std::uint32_t pair = static_cast<std::uint8_t>(agreed.e0) + 256u * static_cast<std::uint8_t>(agreed.e1);
    groups_[group].exponents += weight * pair;
}

std::optional<IntegritySums::Mismatch> IntegritySums::first_mismatch() const {
    for (std::size_t g = 0; g < groups_.size(); ++g) {
        const std::uint32_t computed = groups_[g].result + world_size_ * (groups_[g].exponents + crc_);
        if (groups_[g].received != computed) return Mismatch{g, groups_[g].received, computed};
    }
    return std::nullopt;
}

}  // namespace netsum
