// One worker of a job as a pure state machine (protocol/SPEC.md sections 3 and 5): tensors and results in,
// contributions out.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "netsum/fixed_point.hpp"

namespace netsum {

struct WorkerConfig {
    std::uint32_t rank = 0;
    std::uint32_t world_size = 1;
    std::uint8_t job_number = 0;
    std::uint8_t epoch = 0;
    std::uint16_t slot_base = 0;
    std::uint32_t slots = 0;
    std::uint32_t chunk_elems = 0;
    bool short_exponents = true;  // EXPONENTS instead of DATA with an empty payload
    std::int64_t initial_rto_us = 50'000;
    std::int64_t min_rto_us = 20'000;
    std::int64_t max_rto_us = 1'000'000;
    std::int64_t network_timeout_us = 5'000'000;
    std::int64_t straggler_timeout_us = 30'000'000;
    std::uint64_t first_number =
        0;  // running number to start at (tests of the wrap); the same on all ranks, a multiple of 2 * slots
};

enum class WorkerDrop : std::uint8_t {
    TooShort,
    BadType,
    BadSizeCode,
    BadLength,
    WrongJob,
    StaleEpoch,
    BadSlot,
    StaleNumber,
    DuplicateResult,
    WrongSource,
    Count
};
struct WorkerCounters {
    std::uint64_t packets_out = 0;  // datagrams, resent ones included
    std::uint64_t bytes_out = 0;    // UDP payload bytes of these
    std::uint64_t packets_in = 0;   // datagrams handled, dropped ones included
    std::uint64_t bytes_in = 0;
    std::uint64_t results = 0;  // accepted results
    std::uint64_t fast_retransmits = 0;
    std::uint64_t timer_retransmits = 0;
    std::uint64_t pendings = 0;
    std::uint64_t operations = 0;  // completed without error
    std::uint64_t non_finite_blocks = 0;
    std::array<std::uint64_t, static_cast<std::size_t>(WorkerDrop::Count)> drops{};
};

enum class WorkerError : std::uint8_t { None, SwitchSilent, PeersMissing, Integrity, Overflow, Aborted };
const char* error_name(WorkerError error);  // "none", "switch_silent", ...
struct Completion {
    std::uint64_t operation = 0;  // as returned by submit
    WorkerError error = WorkerError::None;
    std::vector<std::uint32_t> missing_ranks;  // PeersMissing
    std::string detail;                        // phase and numbers, for the error text
};

class WorkerSink {
  public:
    virtual ~WorkerSink() = default;
    // `datagram` points into the transmit image of a slot and stays valid until the next call of handle().
    virtual void send(std::span<const std::uint8_t> datagram) = 0;
};

class WorkerMachine {
  public:
    explicit WorkerMachine(const WorkerConfig& config);  // throws std::invalid_argument
    ~WorkerMachine();
    // The tensor at `data` (contiguous) must stay alive and untouched until its completion. Returns the operation's
    // index, 0, 1, 2, ...
    std::uint64_t submit(void* data, std::uint64_t numel, DType dtype, OpCode op, std::int64_t now_us);
    void handle(std::span<const std::uint8_t> datagram, std::int64_t now_us);
    void poll(std::int64_t now_us,
              WorkerSink& sink);  // sends what may be sent and resends what is due; checks the deadlines
    std::optional<std::int64_t> next_deadline_us() const;  // when poll() wants to be called at the latest
    std::optional<Completion> take_completion();           // in order of completion
    void abort(const std::string& detail);  // fails all unfinished operations; the machine refuses further use

    bool failed() const;  // after an error or abort: every later submit completes at once with Aborted
    const WorkerCounters& counters() const;
    std::int64_t rto_us() const;
    std::int64_t srtt_us() const;  // 0 before the first sample
    std::uint32_t outstanding() const;
    std::vector<std::uint32_t> awaited_ranks() const;  // of the last PENDING since the last result

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace netsum
