#include "netsum/wire.hpp"

namespace netsum {

std::optional<Header> read_header(const std::uint8_t* datagram, std::size_t length) {
    if (length < kHeaderBytes) return std::nullopt;
    Header header;
    header.msg_type = static_cast<std::uint8_t>(datagram[0] >> 4);
    header.size_code = datagram[0] & 7u;
    header.job_number = datagram[1];
    header.tsi = std::uint32_t{datagram[2]} << 24 | std::uint32_t{datagram[3]} << 16 | std::uint32_t{datagram[4]} << 8 |
                 datagram[5];
    header.pool_index = static_cast<std::uint16_t>(datagram[6] << 8 | datagram[7]);
    return header;
}

void write_header(const Header& header, std::uint8_t* datagram) {
    datagram[0] = static_cast<std::uint8_t>(header.msg_type << 4 | (header.size_code & 7u));
    datagram[1] = header.job_number;
    datagram[2] = static_cast<std::uint8_t>(header.tsi >> 24);
    datagram[3] = static_cast<std::uint8_t>(header.tsi >> 16);
    datagram[4] = static_cast<std::uint8_t>(header.tsi >> 8);
    datagram[5] = static_cast<std::uint8_t>(header.tsi);
    datagram[6] = static_cast<std::uint8_t>(header.pool_index >> 8);
    datagram[7] = static_cast<std::uint8_t>(header.pool_index);
}

}  // namespace netsum
