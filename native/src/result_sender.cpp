#include "result_sender.hpp"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "netsum/wire.hpp"

namespace netsum {

namespace {

constexpr std::size_t kKeptBytes = 16 * kMaxDatagramBytes;
constexpr std::size_t kResultsBeforeFlush = 512;

}  // namespace

ResultSender::ResultSender(UdpSocket& socket) : socket_(socket), kept_(kKeptBytes) {
    with_unicast_.reserve(routes_.size());
}

void ResultSender::open_job(std::uint8_t job_number, const std::vector<Address>& workers,
                            const std::optional<Address>& group) {
    Route& route = routes_[job_number];
    route = {workers, group, false, {}};
    route.unicast.reserve(kResultsBeforeFlush);
}

void ResultSender::set_multicast(std::uint8_t job_number, bool multicast) {
    Route& route = routes_[job_number];
    if (multicast && !route.group)
        throw std::invalid_argument("job " + std::to_string(job_number) + " has no multicast group");
    route.multicast = multicast;
}

void ResultSender::close_job(std::uint8_t job_number) {
    routes_[job_number] = {};
}

void ResultSender::result(std::uint8_t job_number, std::span<const std::uint8_t> datagram) {
    Route& route = routes_[job_number];
    if (route.multicast) {
        socket_.queue(datagram, *route.group);
        return;
    }
    if (route.unicast.size() == kResultsBeforeFlush) flush();
    if (route.unicast.empty()) with_unicast_.push_back(job_number);
    route.unicast.push_back(datagram);
}

void ResultSender::replay(std::uint8_t, const Address& worker, std::span<const std::uint8_t> datagram) {
    socket_.queue(datagram, worker);
}

void ResultSender::answer(const Address& worker, std::span<const std::uint8_t> datagram) {
    socket_.queue(keep(datagram), worker);
}

void ResultSender::probe_all(std::uint8_t job_number, std::span<const std::uint8_t> datagram) {
    const Route& route = routes_[job_number];
    if (route.group) socket_.queue(keep(datagram), *route.group);
}

// By worker, not by result: a worker's datagrams in a row become one message.
void ResultSender::flush() {
    for (const std::uint8_t job_number : with_unicast_) {
        Route& route = routes_[job_number];
        for (const Address& worker : route.workers) {
            for (const auto& datagram : route.unicast) socket_.queue(datagram, worker);
        }
        route.unicast.clear();
    }
    with_unicast_.clear();
    socket_.flush();
    kept_bytes_ = 0;
}

std::span<const std::uint8_t> ResultSender::keep(std::span<const std::uint8_t> datagram) {
    if (kept_bytes_ + datagram.size() > kept_.size()) {
        flush();
        if (datagram.size() > kept_.size()) kept_.resize(datagram.size());
    }
    const auto copy = std::span(kept_).subspan(kept_bytes_, datagram.size());
    std::copy(datagram.begin(), datagram.end(), copy.begin());
    kept_bytes_ += datagram.size();
    return copy;
}

}  // namespace netsum
