// UdpSocket on real loopback sockets.
#include <doctest/doctest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <system_error>
#include <vector>

#include "netsum/clock.hpp"
#include "netsum/udp.hpp"

using namespace netsum;

namespace {

using Bytes = std::vector<std::uint8_t>;
const Address kLoopback = parse_address("127.0.0.1", 0);
const Address kGroup = parse_address("239.255.77.1", 0);

struct Arrival {
    Bytes datagram;
    Address source;
};

// What arrives until `count` are there, or nothing has come for a second.
std::vector<Arrival> receive_all(UdpSocket& socket, std::size_t count) {
    std::vector<Arrival> arrivals;
    while (arrivals.size() < count) {
        pollfd readable{socket.fd(), POLLIN, 0};
        if (poll(&readable, 1, 1000) <= 0) break;
        socket.receive([&](std::span<const std::uint8_t> datagram, const Address& source) {
            arrivals.push_back({Bytes(datagram.begin(), datagram.end()), source});
        });
    }
    return arrivals;
}

std::vector<Bytes> numbered(std::size_t count, std::size_t bytes) {
    std::vector<Bytes> datagrams;
    for (std::size_t i = 0; i < count; ++i) datagrams.emplace_back(bytes, static_cast<std::uint8_t>(i));
    return datagrams;
}

void queue_all(UdpSocket& socket, const std::vector<Bytes>& datagrams, const Address& destination) {
    for (const Bytes& datagram : datagrams) socket.queue(datagram, destination);
}

void check_arrived(const std::vector<Arrival>& arrivals, const std::vector<Bytes>& datagrams, const Address& source) {
    REQUIRE(arrivals.size() == datagrams.size());
    for (std::size_t i = 0; i < datagrams.size(); ++i) {
        CHECK(arrivals[i].datagram == datagrams[i]);
        CHECK(arrivals[i].source == source);
    }
}

}  // namespace

TEST_CASE("addresses: text and back, names refused") {
    CHECK(to_string(parse_address("10.1.2.3", 48800)) == "10.1.2.3:48800");
    CHECK_THROWS_AS(parse_address("localhost", 1), std::invalid_argument);
    CHECK_THROWS_AS(parse_address("::1", 1), std::invalid_argument);
}

TEST_CASE("a taken port is named, with errno") {
    UdpSocket first(kLoopback, {});
    REQUIRE(first.address().port != 0);
    try {
        UdpSocket second(first.address(), {});
        FAIL("bound twice");
    } catch (const std::system_error& error) {
        CHECK(error.code().value() == EADDRINUSE);
        CHECK(std::string(error.what()).find(to_string(first.address())) != std::string::npos);
    }
}

TEST_CASE("the granted buffer is what the kernel says") {
    UdpSocket small(kLoopback, {.receive_buffer_bytes = 64 << 10});
    CHECK(small.receive_buffer_bytes() == 64 << 10);
    UdpSocket huge(kLoopback, {.receive_buffer_bytes = 1 << 29});
    CHECK(huge.receive_buffer_bytes() > 64 << 10);
}

TEST_CASE("don't fragment: a datagram beyond the path MTU is dropped here, not cut to pieces") {
    UdpSocket socket(kLoopback, {});
    int discover = -1;
    socklen_t length = sizeof discover;
    REQUIRE(getsockopt(socket.fd(), IPPROTO_IP, IP_MTU_DISCOVER, &discover, &length) == 0);
    CHECK(discover == IP_PMTUDISC_DO);
    const Bytes too_long(65508);
    socket.queue(too_long, socket.address());
    socket.flush();
    CHECK(socket.counters().send_dropped == 1);
    CHECK(socket.counters().datagrams_out == 0);
    CHECK(path_mtu(parse_address("127.0.0.1", 9)) >= 1500);
}

TEST_CASE("equal lengths to one destination leave as one message and arrive as the datagrams they were") {
    UdpSocket sender(kLoopback, {});
    UdpSocket receiver(kLoopback, {});
    auto datagrams = numbered(70, 100);   // more than fit one message (64 segments)
    datagrams.push_back(Bytes(40, 200));  // a shorter last one, which closes the message
    datagrams.push_back(Bytes(40, 201));
    datagrams.push_back(Bytes(100, 202));  // longer: a message of its own
    datagrams.push_back(Bytes());          // empty
    datagrams.push_back(Bytes(8216, 203));

    SUBCASE("with segmentation offload") {
        queue_all(sender, datagrams, receiver.address());
        sender.flush();
        CHECK(sender.counters().syscalls_out == 1);
        CHECK(sender.counters().gso_off == 0);
        check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
        CHECK(receiver.counters().syscalls_in < datagrams.size() / 2);
    }
    SUBCASE("without") {
        sender.disable_segmentation();
        queue_all(sender, datagrams, receiver.address());
        sender.flush();
        CHECK(sender.counters().gso_off == 1);
        check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
    }
    CHECK(sender.counters().datagrams_out == datagrams.size());
    CHECK(receiver.counters().datagrams_in == datagrams.size());
    CHECK(sender.counters().bytes_out == receiver.counters().bytes_in);
    CHECK(receiver.counters().truncated == 0);
}

TEST_CASE("large datagrams: as many segments as a message of 65,507 bytes holds") {
    UdpSocket sender(kLoopback, {});
    UdpSocket receiver(kLoopback, {});
    const auto datagrams = numbered(30, 8216);
    queue_all(sender, datagrams, receiver.address());
    sender.flush();
    check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
    CHECK(sender.counters().gso_off == 0);
}

TEST_CASE("a kernel that refuses segmentation: everything is sent all the same, once") {
    UdpSocket sender(kLoopback, {});
    UdpSocket receiver(kLoopback, {});
    // Segmentation needs checksums: SO_NO_CHECK makes the kernel answer EIO or EINVAL to UDP_SEGMENT.
    const int on = 1;
    REQUIRE(setsockopt(sender.fd(), SOL_SOCKET, SO_NO_CHECK, &on, sizeof on) == 0);
    auto datagrams = numbered(1, 50);
    for (Bytes& datagram : numbered(20, 300)) datagrams.push_back(std::move(datagram));
    queue_all(sender, datagrams, receiver.address());
    sender.flush();
    check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
    CHECK(sender.counters().gso_off == 1);
    CHECK(sender.counters().send_dropped == 0);

    queue_all(sender, datagrams, receiver.address());
    sender.flush();
    check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
}

TEST_CASE("more than the queue holds") {
    UdpSocket sender(kLoopback, {});
    UdpSocket receiver(kLoopback, {});
    std::vector<Bytes> datagrams;
    for (std::size_t i = 0; i < 1200; ++i) datagrams.push_back(Bytes(20 + i % 3, static_cast<std::uint8_t>(i)));
    queue_all(sender, datagrams, receiver.address());
    sender.flush();
    check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
}

TEST_CASE("a refused port is counted and the next healthy send goes out") {
    UdpSocket sender(kLoopback, {});
    UdpSocket receiver(kLoopback, {});
    Address closed;
    {
        UdpSocket gone(kLoopback, {});
        closed = gone.address();
    }
    const auto datagrams = numbered(3, 64);
    // An unconnected socket hears of ICMP errors only when it asks for them.
    const int on = 1;
    REQUIRE(setsockopt(sender.fd(), IPPROTO_IP, IP_RECVERR, &on, sizeof on) == 0);
    for (int round = 0; round < 3; ++round) {
        queue_all(sender, datagrams, closed);
        sender.flush();
        queue_all(sender, datagrams, receiver.address());
        sender.flush();
        check_arrived(receive_all(receiver, datagrams.size()), datagrams, sender.address());
    }
    CHECK(sender.counters().refused > 0);
    CHECK(sender.counters().send_dropped == 0);
}

TEST_CASE("no room to send: waits 100 ms in all, then counts what it could not send") {
    UdpSocket sender(kLoopback, {});
    // UDP on loopback never pushes back. A TCP connection whose other end does not read does, in the UDP socket's
    // place.
    const int listener = socket(AF_INET, SOCK_STREAM, 0);
    sockaddr_in name{};
    name.sin_family = AF_INET;
    name.sin_addr.s_addr = htonl(kLoopback.ip);
    socklen_t length = sizeof name;
    REQUIRE(bind(listener, reinterpret_cast<sockaddr*>(&name), length) == 0);
    REQUIRE(listen(listener, 1) == 0);
    REQUIRE(getsockname(listener, reinterpret_cast<sockaddr*>(&name), &length) == 0);
    const int stuffed = socket(AF_INET, SOCK_STREAM, 0);
    REQUIRE(connect(stuffed, reinterpret_cast<sockaddr*>(&name), length) == 0);
    const Bytes block(10000);
    for (pollfd writable{stuffed, POLLOUT, 0}; poll(&writable, 1, 200) > 0;) {
        while (send(stuffed, block.data(), block.size(), MSG_DONTWAIT) > 0) continue;
    }
    while (send(stuffed, block.data(), 1, MSG_DONTWAIT) > 0) continue;
    REQUIRE(dup2(stuffed, sender.fd()) == sender.fd());
    for (std::size_t i = 0; i < 3; ++i) sender.queue(std::span(block).first(100 + i), kLoopback);
    const std::int64_t start_us = monotonic_us();
    sender.flush();
    const std::int64_t waited_us = monotonic_us() - start_us;
    CHECK(sender.counters().send_dropped == 3);
    CHECK(waited_us >= 99'000);
    CHECK(waited_us < 2'000'000);
    close(stuffed);
    close(listener);
}

TEST_CASE("what the kernel drops for want of receive buffer is counted") {
    UdpSocket sender(kLoopback, {});
    UdpSocket receiver(kLoopback, {.receive_buffer_bytes = 16 << 10});
    for (int i = 0; i < 40; ++i) {
        const Bytes datagram(4000 + i);
        sender.queue(datagram, receiver.address());
        sender.flush();
    }
    const std::size_t kept = receive_all(receiver, 40).size();
    CHECK(kept < 40);
    // The count comes with the next datagram that is received.
    const Bytes one(10);
    sender.queue(one, receiver.address());
    sender.flush();
    CHECK(receive_all(receiver, 1).size() == 1);
    CHECK(receiver.counters().receive_overflows == 40 - kept);
}

TEST_CASE("multicast on loopback: every receiver of the group gets each datagram once") {
    UdpSocket sender(kLoopback, {});
    sender.send_multicast_from(kLoopback.ip);
    UdpSocket first(kGroup, {.reuse_address = true});
    first.join(kGroup.ip, kLoopback.ip);
    const Address group = first.address();
    UdpSocket second(group, {.reuse_address = true});
    second.join(group.ip, kLoopback.ip);
    UdpSocket other_group(parse_address("239.255.77.2", group.port), {.reuse_address = true});
    other_group.join(other_group.address().ip, kLoopback.ip);

    auto datagrams = numbered(20, 8216);
    datagrams.push_back(Bytes(26, 99));
    queue_all(sender, datagrams, group);
    sender.flush();
    CHECK(sender.counters().syscalls_out == 1);
    CHECK(sender.counters().gso_off == 0);
    for (UdpSocket* receiver : {&first, &second}) {
        check_arrived(receive_all(*receiver, datagrams.size()), datagrams, sender.address());
        CHECK(receiver->receive([](auto, auto&) {}) == 0);
    }
    CHECK(other_group.receive([](auto, auto&) {}) == 0);
}

TEST_CASE("joining on an interface that is not there is an error that names both") {
    UdpSocket socket(kGroup, {.reuse_address = true});
    try {
        socket.join(kGroup.ip, parse_address("203.0.113.9", 0).ip);
        FAIL("joined");
    } catch (const std::system_error& error) {
        CHECK(std::string(error.what()).find("239.255.77.1 on 203.0.113.9") != std::string::npos);
    }
}
