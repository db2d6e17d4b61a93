// An IPv4 endpoint.
#pragma once

#include <cstdint>
#include <string>

namespace netsum {

struct Address {
    std::uint32_t ip = 0;  // host byte order
    std::uint16_t port = 0;
    bool operator==(const Address&) const = default;
};

// `host` in dotted form: names are resolved by the control plane, never on the packet path. Throws
// std::invalid_argument.
Address parse_address(const std::string& host, std::uint16_t port);
std::string host_of(const Address& address);    // "127.0.0.1"
std::string to_string(const Address& address);  // "127.0.0.1:48800"

}  // namespace netsum
