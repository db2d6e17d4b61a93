#include "netsum/address.hpp"

#include <arpa/inet.h>

#include <stdexcept>

namespace netsum {

Address parse_address(const std::string& host, std::uint16_t port) {
    in_addr parsed{};
    if (inet_pton(AF_INET, host.c_str(), &parsed) != 1) {
        throw std::invalid_argument("'" + host + "' is not an IPv4 address in dotted form");
    }
    return {ntohl(parsed.s_addr), port};
}

std::string host_of(const Address& address) {
    const in_addr raw{htonl(address.ip)};
    char text[INET_ADDRSTRLEN] = {};
    inet_ntop(AF_INET, &raw, text, sizeof text);
    return text;
}

std::string to_string(const Address& address) {
    return host_of(address) + ":" + std::to_string(address.port);
}

}  // namespace netsum
