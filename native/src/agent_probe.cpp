// Does the data path to a switch work? PROBE and its answers (SPEC.md section 1).
#include <algorithm>
#include <array>
#include <stdexcept>

#include "netsum/agent_loop.hpp"
#include "netsum/wire.hpp"

namespace netsum {

namespace {

constexpr std::int64_t kResendUs = 100'000;
constexpr std::uint16_t kUnicastAnswer = 1;
constexpr std::uint16_t kMulticastAnswer = 2;

}  // namespace

ProbeAnswers NativeAgent::probe(const ProbeConfig& config) {
    const std::lock_guard lock(mutex_);
    require_not_started("probe");
    const unsigned size_code = size_code_of(config.chunk_elems);
    if (size_code == 0)
        throw std::invalid_argument(std::to_string(config.chunk_elems) + " is not a chunk size of the protocol");
    multicast_.reset();
    if (config.group) {
        multicast_ =
            std::make_unique<UdpSocket>(*config.group, UdpOptions{receive_buffer_bytes_, receive_buffer_bytes_, true});
        multicast_->join(config.group->ip, address().ip);
    }

    std::int64_t now_us = monotonic_us();
    const std::int64_t end_us = now_us + config.timeout_us;
    const Header probe{static_cast<std::uint8_t>(MsgType::Probe), static_cast<std::uint8_t>(size_code),
                       config.job_number, static_cast<std::uint32_t>(now_us), 0};
    std::array<std::uint8_t, kMaxDatagramBytes> datagram{};
    write_header(probe, datagram.data());
    const std::size_t probe_bytes = data_bytes(config.chunk_elems);

    ProbeAnswers answers;
    const auto complete = [&] { return answers.unicast && (answers.multicast || !multicast_); };
    const auto expect = [&](std::uint16_t pool_index, bool& answered) {
        return [&, pool_index](std::span<const std::uint8_t> answer, const Address& source) {
            const auto header = read_header(answer.data(), answer.size());
            if (source != config.switch_address) {
                ++wrong_source_;
            } else if (header && header->msg_type == probe.msg_type && header->job_number == probe.job_number &&
                       header->tsi == probe.tsi && header->pool_index == pool_index && answer.size() >= probe_bytes) {
                answered = true;
            }
        };
    };
    for (std::int64_t resend_us = now_us; !complete() && now_us < end_us && !stopping_; now_us = monotonic_us()) {
        if (now_us >= resend_us) {
            unicast_.queue(std::span(datagram).first(probe_bytes), config.switch_address);
            unicast_.flush();
            resend_us = now_us + kResendUs;
        }
        pollfd descriptors[] = {{unicast_.fd(), POLLIN, 0}, {multicast_ ? multicast_->fd() : -1, POLLIN, 0}};
        sleep_until_readable(descriptors, std::min(resend_us, end_us) - now_us);
        unicast_.receive(expect(kUnicastAnswer, answers.unicast));
        if (multicast_) multicast_->receive(expect(kMulticastAnswer, answers.multicast));
    }
    return answers;
}

}  // namespace netsum
