// The software switch's packet loop: one socket, one SwitchMachine, one thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "netsum/counters.hpp"
#include "netsum/loop_support.hpp"
#include "netsum/switch_machine.hpp"
#include "netsum/udp.hpp"

namespace netsum {

class ResultSender;

// All methods may be called from any thread, and wait for at most one batch of datagrams. After close() they throw
// std::runtime_error, except for close() and the counters.
class NativeSwitch {
  public:
    NativeSwitch(const Address& bind_to, int receive_buffer_bytes, bool multicast);
    ~NativeSwitch();

    Address address() const { return socket_.address(); }
    int receive_buffer_granted_bytes() const { return socket_.receive_buffer_bytes(); }

    void open_job(const SwitchJobConfig& config,
                  const std::optional<Address>& group);  // results by unicast until told otherwise
    void set_results(std::uint8_t job_number, bool multicast);
    void close_job(std::uint8_t job_number);

    CounterMap counters();
    CounterMap job_counters(std::uint8_t job_number);
    std::uint32_t slots_in_use(std::uint8_t job_number);
    std::vector<std::uint32_t> awaited_ranks(std::uint8_t job_number);

    void close();  // stops the thread and waits for it; again and again if you like

  private:
    void run();
    std::size_t step();  // one batch; datagrams handled
    void require_open() const;

    // Taken by the loop for one batch at a time.
    FairMutex mutex_;
    UdpSocket socket_;
    SwitchMachine machine_;
    std::unique_ptr<ResultSender> sender_;
    std::uint64_t internal_errors_ = 0;

    bool multicast_;
    WakeEvent wake_;
    std::atomic<bool> stopping_ = false;
    std::mutex closing_;  // one close() joins, another waits for it
    std::thread thread_;
};

}  // namespace netsum
