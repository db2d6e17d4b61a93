#include "netsum/udp.hpp"

#include <poll.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <system_error>
#include <utility>

#include "netsum/clock.hpp"
#include "udp_batch.hpp"

namespace netsum {

namespace {

constexpr std::int64_t kSendWaitUs = 100'000;

[[noreturn]] void fail(const std::string& what, const Address& address) {
    const int error = errno;
    std::string text = "UDP " + to_string(address) + ": " + what;
    if (error == EADDRINUSE) text += " (another process has this port; port 0 takes a free one)";
    throw std::system_error(error, std::generic_category(), text);
}

template <typename Value>
bool set_option(int fd, int level, int name, const Value& value) {
    return setsockopt(fd, level, name, &value, sizeof value) == 0;
}

int get_option(int fd, int level, int name) {
    int value = 0;
    socklen_t length = sizeof value;
    return getsockopt(fd, level, name, &value, &length) == 0 ? value : 0;
}

// Beyond net.core.*mem_max where the process may, up to it otherwise. The kernel doubles the number for its own
// bookkeeping.
int grant_buffer(int fd, int force_name, int name, int bytes) {
    if (!set_option(fd, SOL_SOCKET, force_name, bytes)) set_option(fd, SOL_SOCKET, name, bytes);
    return get_option(fd, SOL_SOCKET, name) / 2;
}

class Descriptor {  // closes unless released
  public:
    explicit Descriptor(int fd) : fd_(fd) {}
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }

  private:
    int fd_;
};

}  // namespace

UdpSocket::UdpSocket(const Address& bind_to, const UdpOptions& options)
    : address_(bind_to), receive_(std::make_unique<ReceiveBatch>()), send_(std::make_unique<SendBatch>()) {
    Descriptor fd(socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) fail("socket", bind_to);
    if (options.reuse_address && !set_option(fd.get(), SOL_SOCKET, SO_REUSEADDR, 1)) fail("SO_REUSEADDR", bind_to);
    if (!set_option(fd.get(), IPPROTO_IP, IP_MTU_DISCOVER, int{IP_PMTUDISC_DO})) fail("IP_MTU_DISCOVER", bind_to);
    // A socket gets its own groups only, not those that others on this host have joined.
    if (!set_option(fd.get(), IPPROTO_IP, IP_MULTICAST_ALL, 0)) fail("IP_MULTICAST_ALL", bind_to);
    receive_buffer_bytes_ = grant_buffer(fd.get(), SO_RCVBUFFORCE, SO_RCVBUF, options.receive_buffer_bytes);
    grant_buffer(fd.get(), SO_SNDBUFFORCE, SO_SNDBUF, options.send_buffer_bytes);
    set_option(fd.get(), SOL_SOCKET, SO_RXQ_OVFL, 1);
    set_option(fd.get(), SOL_UDP, UDP_GRO, 1);  // kernels before 5.0 do without

    const sockaddr_in name = to_sockaddr(bind_to);
    if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) fail("bind", bind_to);
    sockaddr_in bound{};
    socklen_t length = sizeof bound;
    if (getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length) != 0) fail("getsockname", bind_to);
    address_ = from_sockaddr(bound);
    fd_ = fd.release();
}

UdpSocket::~UdpSocket() {
    close(fd_);
}

void UdpSocket::send_multicast_from(std::uint32_t interface_ip) {
    ip_mreqn interface{};
    interface.imr_address.s_addr = htonl(interface_ip);
    if (!set_option(fd_, IPPROTO_IP, IP_MULTICAST_IF, interface)) fail("IP_MULTICAST_IF", address_);
    if (!set_option(fd_, IPPROTO_IP, IP_MULTICAST_LOOP, 1)) fail("IP_MULTICAST_LOOP", address_);
    if (!set_option(fd_, IPPROTO_IP, IP_MULTICAST_TTL, 1)) fail("IP_MULTICAST_TTL", address_);
}

void UdpSocket::join(std::uint32_t group_ip, std::uint32_t interface_ip) {
    ip_mreq membership{};
    membership.imr_multiaddr.s_addr = htonl(group_ip);
    membership.imr_interface.s_addr = htonl(interface_ip);
    if (!set_option(fd_, IPPROTO_IP, IP_ADD_MEMBERSHIP, membership)) {
        fail("IP_ADD_MEMBERSHIP of " + host_of({group_ip, 0}) + " on " + host_of({interface_ip, 0}), address_);
    }
}

std::span<const UdpSocket::Received> UdpSocket::receive_messages() {
    receive_->reset();
    int messages = 0;
    do {
        messages = recvmmsg(fd_, receive_->headers, static_cast<unsigned>(receive_->messages), MSG_DONTWAIT, nullptr);
        ++counters_.syscalls_in;
        if (messages < 0 && errno == ECONNREFUSED) ++counters_.refused;
    } while (messages < 0 && (errno == EINTR || errno == ECONNREFUSED));

    std::size_t usable = 0;
    std::size_t bytes = 0;
    for (int i = 0; i < messages; ++i) {
        msghdr& header = receive_->headers[i].msg_hdr;
        const std::size_t length = receive_->headers[i].msg_len;
        bytes += length;
        if (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) {
            ++counters_.truncated;
            continue;
        }
        std::size_t segment_bytes = length;
        for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr; control = CMSG_NXTHDR(&header, control)) {
            if (control->cmsg_level == SOL_UDP && control->cmsg_type == UDP_GRO) {
                int gro_bytes = 0;
                std::memcpy(&gro_bytes, CMSG_DATA(control), sizeof gro_bytes);
                if (gro_bytes > 0) segment_bytes = static_cast<std::size_t>(gro_bytes);
            } else if (control->cmsg_level == SOL_SOCKET && control->cmsg_type == SO_RXQ_OVFL) {
                std::uint32_t overflow = 0;
                std::memcpy(&overflow, CMSG_DATA(control), sizeof overflow);
                counters_.receive_overflows += overflow - last_overflow_;
                last_overflow_ = overflow;
            }
        }
        counters_.datagrams_in += length == 0 ? 1 : (length + segment_bytes - 1) / segment_bytes;
        counters_.bytes_in += length;
        receive_->received[usable++] = {static_cast<const std::uint8_t*>(header.msg_iov->iov_base), length,
                                        segment_bytes, from_sockaddr(receive_->names[i])};
    }
    if (messages > 0) receive_->adapt(static_cast<std::size_t>(messages), bytes);
    return {receive_->received, usable};
}

void UdpSocket::queue(std::span<const std::uint8_t> datagram, const Address& destination) {
    if (send_->full()) flush();
    send_->add(datagram, destination);
}

void UdpSocket::flush() {
    if (send_->messages.empty()) return;
    send_->prepare(0);
    std::int64_t deadline_us = 0;  // set by the first wait
    for (std::size_t next = 0; next < send_->messages.size();) next = send_some(next, deadline_us);
    send_->clear();
}

void UdpSocket::disable_segmentation() {
    send_->segmentation = false;
    counters_.gso_off = 1;
}

// One sendmmsg from message `first` on, and what its outcome asks for. Returns the next message to send.
std::size_t UdpSocket::send_some(std::size_t first, std::int64_t& deadline_us) {
    SendBatch& batch = *send_;
    const int sent =
        sendmmsg(fd_, batch.headers.data() + first, static_cast<unsigned>(batch.messages.size() - first), MSG_DONTWAIT);
    ++counters_.syscalls_out;
    if (sent > 0) {
        const std::size_t next = first + static_cast<std::size_t>(sent);
        for (std::size_t i = first; i < next; ++i) {
            counters_.datagrams_out += batch.messages[i].segments;
            counters_.bytes_out += batch.messages[i].bytes;
        }
        return next;
    }
    const int error = errno;
    if (error == EINTR) return first;
    if (error == ECONNREFUSED) {  // about an earlier datagram, and cleared by being reported
        ++counters_.refused;
        return first;
    }
    if ((error == EIO || error == EINVAL) && batch.messages[first].segments > 1) {
        disable_segmentation();
        batch.split(first);
        batch.prepare(0);
        return 0;
    }
    if (error == EAGAIN || error == ENOBUFS) {
        const std::int64_t now_us = monotonic_us();
        if (deadline_us == 0) deadline_us = now_us + kSendWaitUs;
        if (now_us < deadline_us) {
            // With ENOBUFS the socket is writable and the device is not: look again in a millisecond.
            pollfd writable{error == EAGAIN ? fd_ : -1, POLLOUT, 0};
            const timespec timeout = timespec_of_us(error == EAGAIN ? deadline_us - now_us : 1'000);
            ppoll(&writable, 1, &timeout, nullptr);
            return first;
        }
    }
    counters_.send_dropped += batch.messages[first].segments;
    return first + 1;
}

int path_mtu(const Address& destination) {
    Descriptor fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
    if (fd.get() < 0) fail("socket", destination);
    if (!set_option(fd.get(), IPPROTO_IP, IP_MTU_DISCOVER, int{IP_PMTUDISC_DO})) fail("IP_MTU_DISCOVER", destination);
    const sockaddr_in name = to_sockaddr(destination);
    if (connect(fd.get(), reinterpret_cast<const sockaddr*>(&name), sizeof name) != 0) fail("connect", destination);
    const int mtu_bytes = get_option(fd.get(), IPPROTO_IP, IP_MTU);
    if (mtu_bytes <= 0) fail("IP_MTU", destination);
    return mtu_bytes;
}

}  // namespace netsum
