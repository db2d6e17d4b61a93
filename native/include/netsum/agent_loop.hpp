// A worker's packet loop: a data socket, a receiver of the job's multicast group, one WorkerMachine, one thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "netsum/counters.hpp"
#include "netsum/faults.hpp"
#include "netsum/loop_support.hpp"
#include "netsum/udp.hpp"
#include "netsum/worker_machine.hpp"

namespace netsum {

struct ProbeConfig {
    Address switch_address;
    std::optional<Address> group;
    std::uint8_t job_number = 0;
    std::uint32_t chunk_elems = 0;
    std::int64_t timeout_us = 0;
};
struct ProbeAnswers {
    bool unicast = false;
    bool multicast = false;
};

// Life: configure (set_faults, probe), start() once, then submit() and next_completion() from any thread, close().
class NativeAgent {
  public:
    NativeAgent(const Address& bind_to, int receive_buffer_bytes);
    ~NativeAgent();

    Address address() const { return unicast_.address(); }

    void set_faults(const FaultConfig& config);  // of both directions, each with its own sequence of random numbers
    // Sends PROBE (SPEC.md section 1) every 100 ms until all answers asked for are in or the time is over. Joins the
    // group.
    ProbeAnswers probe(const ProbeConfig& config);
    // `multicast`: results come to the group of probe(); otherwise the group is left.
    void start(const WorkerConfig& config, const Address& switch_address, bool multicast);

    // The tensor at `data` must stay alive and untouched until its completion is taken. Throws std::runtime_error when
    // not running.
    std::uint64_t submit(void* data, std::uint64_t numel, DType dtype, OpCode op);
    // The next completion in order; none when the time is over, or after close() when all are taken.
    std::optional<Completion> next_completion(std::int64_t timeout_us);
    void abort(const std::string& detail);  // fails all unfinished operations; no tensor is touched after it returns

    CounterMap counters();
    std::vector<std::uint32_t> awaited_ranks();

    // Fails what is unfinished, stops the thread and waits for it, wakes all waiters. Again and again if you like.
    void close();

  private:
    class Sender;
    void run();
    std::size_t step();  // one batch from each socket, one poll of the machine; datagrams received
    std::size_t receive(UdpSocket& socket, std::int64_t now_us);
    void handle(std::span<const std::uint8_t> datagram, const Address& source, std::int64_t now_us);
    void publish_completions();
    std::int64_t sleep_us();
    void require_not_started(const char* what) const;

    // Taken by the loop for one step at a time. Taken before completions_mutex_, never after.
    FairMutex mutex_;
    UdpSocket unicast_;
    std::unique_ptr<UdpSocket> multicast_;
    std::unique_ptr<FaultInjector> faults_in_;  // null: no faults
    std::unique_ptr<FaultInjector> faults_out_;
    std::unique_ptr<WorkerMachine> machine_;  // null before start()
    Address switch_address_;
    std::uint64_t wrong_source_ = 0;
    int receive_buffer_bytes_;

    std::mutex completions_mutex_;
    std::condition_variable completed_;
    std::deque<Completion> completions_;
    bool closed_ = false;

    WakeEvent wake_;
    std::atomic<bool> stopping_ = false;
    std::mutex closing_;  // one close() joins, another waits for it
    std::thread thread_;
};

}  // namespace netsum
