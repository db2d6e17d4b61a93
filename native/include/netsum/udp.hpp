// UDP over IPv4 in batches: recvmmsg with GRO, sendmmsg with segmentation offload, IP multicast.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "netsum/address.hpp"

namespace netsum {

struct UdpOptions {
    int receive_buffer_bytes = 4 << 20;  // asked; see UdpSocket::receive_buffer_bytes()
    int send_buffer_bytes = 4 << 20;
    bool reuse_address = false;  // several receivers of one multicast group on a host
};

// Never reset. Bytes are UDP payload. A train of segments counts as its datagrams.
struct UdpCounters {
    std::uint64_t datagrams_in = 0;
    std::uint64_t bytes_in = 0;
    std::uint64_t syscalls_in = 0;
    std::uint64_t datagrams_out = 0;
    std::uint64_t bytes_out = 0;
    std::uint64_t syscalls_out = 0;
    std::uint64_t truncated = 0;          // messages dropped because the kernel cut them or their control data
    std::uint64_t receive_overflows = 0;  // datagrams the kernel dropped for want of receive buffer
    std::uint64_t refused = 0;            // ICMP port unreachable for something sent earlier
    std::uint64_t send_dropped = 0;       // datagrams that could not be sent: the protocol repairs it
    std::uint64_t gso_off = 0;            // 1 once the kernel has refused segmentation offload
};

// One thread at a time. Errors of construction and configuration are std::system_error and name the address; errors of
// traffic are counted.
class UdpSocket {
  public:
    UdpSocket(const Address& bind_to, const UdpOptions& options);
    ~UdpSocket();
    UdpSocket(const UdpSocket&) = delete;
    UdpSocket& operator=(const UdpSocket&) = delete;

    int fd() const { return fd_; }
    Address address() const { return address_; }                        // with the port the kernel chose
    int receive_buffer_bytes() const { return receive_buffer_bytes_; }  // granted by the kernel
    const UdpCounters& counters() const { return counters_; }

    // Sends to groups leave by the interface that has `interface_ip` (0: the kernel's choice), reach this host's
    // receivers, and cross no router.
    void send_multicast_from(std::uint32_t interface_ip);
    void join(std::uint32_t group_ip, std::uint32_t interface_ip);

    // One batch: `handle(std::span<const std::uint8_t> datagram, const Address& source)` for each datagram. Returns
    // their number, 0 when there is nothing to read. Spans are valid until the next receive().
    template <typename Handler>
    std::size_t receive(Handler&& handle);

    // Queues without copying: `datagram` must stay as it is until flush(). Datagrams of one length to one destination
    // in a row leave as one message with segmentation offload. Flushes by itself when the queue is full.
    void queue(std::span<const std::uint8_t> datagram, const Address& destination);
    // Sends what is queued. When the kernel has no room it waits, at most 100 ms in all, then counts the rest as
    // dropped.
    void flush();
    // As if the kernel had refused segmentation offload.
    void disable_segmentation();

  private:
    struct ReceiveBatch;
    struct SendBatch;
    struct Received {
        const std::uint8_t* data;
        std::size_t length;
        std::size_t segment_bytes;
        Address source;
    };
    std::span<const Received> receive_messages();
    std::size_t send_some(std::size_t first, std::int64_t& deadline_us);

    int fd_ = -1;
    Address address_;
    int receive_buffer_bytes_ = 0;
    UdpCounters counters_;
    std::uint32_t last_overflow_ = 0;  // the kernel's own count, modulo 2^32
    std::unique_ptr<ReceiveBatch> receive_;
    std::unique_ptr<SendBatch> send_;
};

// The largest IPv4 packet, in bytes, that leaves whole on the way to `destination`, as far as this host knows.
int path_mtu(const Address& destination);

template <typename Handler>
std::size_t UdpSocket::receive(Handler&& handle) {
    std::size_t datagrams = 0;
    for (const Received& message : receive_messages()) {
        std::size_t offset = 0;
        do {  // an empty datagram is a datagram
            const std::size_t length = std::min(message.segment_bytes, message.length - offset);
            ++datagrams;
            handle(std::span<const std::uint8_t>(message.data + offset, length), message.source);
            offset += length;
        } while (offset < message.length);
    }
    return datagrams;
}

}  // namespace netsum
