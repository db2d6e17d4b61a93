// The packet layout of protocol/SPEC.md section 1.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

namespace netsum {

inline constexpr std::size_t kHeaderBytes = 8;
inline constexpr std::uint32_t kMaxSlots = 0x8000;      // pool_index has 15 bits for them
inline constexpr std::uint32_t kNumberMask = 0xFFFFFF;  // running numbers have 24 bits on the wire
inline constexpr std::size_t kMaxDatagramBytes = 8216;  // DATA of size code 6

// If you add a message type: also SPEC.md, netsum.protocol.wire, netsum.protocol.scapy_layer, the P4 headers.
enum class MsgType : std::uint8_t { Data = 1, Pending = 2, Exponents = 3, Probe = 5 };

struct Header {
    std::uint8_t msg_type = 0;
    std::uint8_t size_code = 0;
    std::uint8_t job_number = 0;
    std::uint32_t tsi = 0;  // epoch << 24 | number
    std::uint16_t pool_index = 0;

    std::uint8_t epoch() const { return static_cast<std::uint8_t>(tsi >> 24); }
    std::uint32_t number() const { return tsi & kNumberMask; }
    std::uint8_t version() const { return static_cast<std::uint8_t>(pool_index >> 15); }
    std::uint16_t slot() const { return pool_index & 0x7FFFu; }
};

// Elements of a size code, or 0 for a reserved one.
constexpr std::size_t chunk_elems_of(unsigned size_code) {
    switch (size_code) {
        case 1:
            return 64;
        case 3:
            return 256;
        case 4:
            return 512;
        case 5:
            return 1024;
        case 6:
            return 2048;
        default:
            return 0;
    }
}
// Size code of a chunk length, or 0 when there is none.
constexpr unsigned size_code_of(std::size_t chunk_elems) {
    switch (chunk_elems) {
        case 64:
            return 1;
        case 256:
            return 3;
        case 512:
            return 4;
        case 1024:
            return 5;
        case 2048:
            return 6;
        default:
            return 0;
    }
}
constexpr std::size_t exponent_pairs_of(std::size_t chunk_elems) {
    return chunk_elems <= 256 ? 1 : chunk_elems / 256;
}
constexpr std::size_t exponents_bytes(std::size_t chunk_elems) {
    return kHeaderBytes + 2 * exponent_pairs_of(chunk_elems);
}
constexpr std::size_t data_bytes(std::size_t chunk_elems) {
    return exponents_bytes(chunk_elems) + 4 * chunk_elems;
}

std::optional<Header> read_header(const std::uint8_t* datagram, std::size_t length);
void write_header(const Header& header, std::uint8_t* datagram);

// a < b for 24-bit serial numbers.
constexpr bool serial_less(std::uint32_t a, std::uint32_t b) {
    const std::uint32_t distance = (b - a) & kNumberMask;
    return distance >= 1 && distance <= 0x7FFFFFu;
}

}  // namespace netsum
