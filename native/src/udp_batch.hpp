// The arrays that recvmmsg and sendmmsg want, allocated once per socket.
#pragma once

#include <netinet/in.h>
#include <netinet/udp.h>
#include <sys/socket.h>

#include <cstring>
#include <memory>
#include <vector>

#include "netsum/udp.hpp"

namespace netsum {

// A batch should fit the L2 cache twice (kernel's copy in, machine's reading), and save system calls when messages are
// small.
inline constexpr std::size_t kReceiveBatchBytes = 256 << 10;
inline constexpr std::size_t kMinReceiveMessages = 4;
inline constexpr std::size_t kMaxReceiveMessages = 32;
inline constexpr std::size_t kReceiveMessageBytes = 64 << 10;  // a train that GRO put together has up to 65,507 bytes
inline constexpr std::size_t kMaxQueuedDatagrams = 512;
inline constexpr std::size_t kMaxSegments = 64;         // UDP_MAX_SEGMENTS of all kernels
inline constexpr std::size_t kMaxMessageBytes = 65507;  // 65,535 less IPv4 and UDP headers

inline sockaddr_in to_sockaddr(const Address& address) {
    sockaddr_in raw{};
    raw.sin_family = AF_INET;
    raw.sin_addr.s_addr = htonl(address.ip);
    raw.sin_port = htons(address.port);
    return raw;
}
inline Address from_sockaddr(const sockaddr_in& raw) {
    return {ntohl(raw.sin_addr.s_addr), ntohs(raw.sin_port)};
}

struct UdpSocket::ReceiveBatch {
    // Room for the segment size of GRO and the overflow count.
    struct alignas(cmsghdr) Control {
        char bytes[CMSG_SPACE(sizeof(int)) + CMSG_SPACE(sizeof(std::uint32_t))];
    };
    std::unique_ptr<std::uint8_t[]> buffers{new std::uint8_t[kMaxReceiveMessages * kReceiveMessageBytes]};
    mmsghdr headers[kMaxReceiveMessages];
    iovec iovecs[kMaxReceiveMessages];
    sockaddr_in names[kMaxReceiveMessages];
    Control controls[kMaxReceiveMessages];
    Received received[kMaxReceiveMessages];

    std::size_t messages = kMinReceiveMessages;  // to ask for

    // `received` messages had `bytes` bytes: how many to ask for next time.
    void adapt(std::size_t received, std::size_t bytes) {
        const std::size_t fitting = bytes == 0 ? kMaxReceiveMessages : kReceiveBatchBytes * received / bytes;
        messages = std::clamp(fitting, kMinReceiveMessages, kMaxReceiveMessages);
    }

    // The kernel overwrites lengths: set them anew before each call.
    void reset() {
        for (std::size_t i = 0; i < messages; ++i) {
            iovecs[i] = {buffers.get() + i * kReceiveMessageBytes, kReceiveMessageBytes};
            headers[i] = {};
            headers[i].msg_hdr.msg_name = &names[i];
            headers[i].msg_hdr.msg_namelen = sizeof names[i];
            headers[i].msg_hdr.msg_iov = &iovecs[i];
            headers[i].msg_hdr.msg_iovlen = 1;
            headers[i].msg_hdr.msg_control = controls[i].bytes;
            headers[i].msg_hdr.msg_controllen = sizeof controls[i].bytes;
        }
    }
};

struct UdpSocket::SendBatch {
    // Datagrams of one length to one destination; the last may be shorter, and then it is closed.
    struct Message {
        Address destination;
        std::size_t first = 0;  // in iovecs
        std::size_t segments = 0;
        std::size_t segment_bytes = 0;
        std::size_t bytes = 0;
        bool open = true;
    };
    struct alignas(cmsghdr) Control {
        char bytes[CMSG_SPACE(sizeof(std::uint16_t))];
    };
    std::vector<Message> messages;
    std::vector<iovec> iovecs;
    std::vector<mmsghdr> headers{kMaxQueuedDatagrams};
    std::vector<sockaddr_in> names{kMaxQueuedDatagrams};
    std::vector<Control> controls{kMaxQueuedDatagrams};
    bool segmentation = true;

    SendBatch() {
        messages.reserve(kMaxQueuedDatagrams);
        iovecs.reserve(kMaxQueuedDatagrams);
    }

    bool full() const { return iovecs.size() == kMaxQueuedDatagrams; }

    void add(std::span<const std::uint8_t> datagram, const Address& destination) {
        if (!messages.empty() && segmentation) {
            Message& last = messages.back();
            if (last.open && last.destination == destination && !datagram.empty() &&
                datagram.size() <= last.segment_bytes && last.segments < kMaxSegments &&
                last.bytes + datagram.size() <= kMaxMessageBytes) {
                ++last.segments;
                last.bytes += datagram.size();
                last.open = datagram.size() == last.segment_bytes;
                push(datagram);
                return;
            }
        }
        messages.push_back({destination, iovecs.size(), 1, datagram.size(), datagram.size(), true});
        push(datagram);
    }

    // Headers for the messages from `first` on.
    void prepare(std::size_t first) {
        for (std::size_t i = first; i < messages.size(); ++i) {
            const Message& message = messages[i];
            names[i] = to_sockaddr(message.destination);
            msghdr& header = headers[i].msg_hdr;
            header = {};
            header.msg_name = &names[i];
            header.msg_namelen = sizeof names[i];
            header.msg_iov = &iovecs[message.first];
            header.msg_iovlen = message.segments;
            if (message.segments > 1) {
                header.msg_control = controls[i].bytes;
                header.msg_controllen = sizeof controls[i].bytes;
                cmsghdr* control = CMSG_FIRSTHDR(&header);
                control->cmsg_level = SOL_UDP;
                control->cmsg_type = UDP_SEGMENT;
                control->cmsg_len = CMSG_LEN(sizeof(std::uint16_t));
                const auto segment_bytes = static_cast<std::uint16_t>(message.segment_bytes);
                std::memcpy(CMSG_DATA(control), &segment_bytes, sizeof segment_bytes);
            }
        }
    }

    // One message for each datagram of the messages from `first` on, which become all there is.
    void split(std::size_t first) {
        std::vector<Message> single;
        single.reserve(kMaxQueuedDatagrams);
        for (std::size_t i = first; i < messages.size(); ++i) {
            for (std::size_t j = 0; j < messages[i].segments; ++j) {
                const std::size_t bytes = iovecs[messages[i].first + j].iov_len;
                single.push_back({messages[i].destination, messages[i].first + j, 1, bytes, bytes, false});
            }
        }
        messages = std::move(single);
    }

    void clear() {
        messages.clear();
        iovecs.clear();
    }

  private:
    void push(std::span<const std::uint8_t> datagram) {
        // The kernel only reads from it; iovec has no const form.
        iovecs.push_back({const_cast<std::uint8_t*>(datagram.data()), datagram.size()});
    }
};

}  // namespace netsum
