// Where the switch's datagrams go: by multicast, or to the workers of a job one by one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "netsum/switch_machine.hpp"
#include "netsum/udp.hpp"

namespace netsum {

class ResultSender final : public SwitchSink {
  public:
    explicit ResultSender(UdpSocket& socket);

    void open_job(std::uint8_t job_number, const std::vector<Address>& workers, const std::optional<Address>& group);
    void set_multicast(std::uint8_t job_number,
                       bool multicast);  // throws std::invalid_argument when the job has no group
    void close_job(std::uint8_t job_number);

    void result(std::uint8_t job_number, std::span<const std::uint8_t> datagram) override;
    void replay(std::uint8_t job_number, const Address& worker, std::span<const std::uint8_t> datagram) override;
    void answer(const Address& worker, std::span<const std::uint8_t> datagram) override;
    void probe_all(std::uint8_t job_number, std::span<const std::uint8_t> datagram) override;
    void flush() override;

  private:
    struct Route {
        std::vector<Address> workers;
        std::optional<Address> group;
        bool multicast = false;
        std::vector<std::span<const std::uint8_t>> unicast;  // results of this batch that go to each worker
    };
    std::span<const std::uint8_t> keep(std::span<const std::uint8_t> datagram);

    UdpSocket& socket_;
    std::array<Route, 256> routes_;           // by job number
    std::vector<std::uint8_t> with_unicast_;  // job numbers whose `unicast` is not empty
    std::vector<std::uint8_t> kept_;          // copies of answers, until flush()
    std::size_t kept_bytes_ = 0;
};

}  // namespace netsum
