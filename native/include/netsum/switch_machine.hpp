// The switch as a pure state machine (protocol/SPEC.md section 4): datagrams in, datagrams out; no socket, no clock, no
// thread.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "netsum/address.hpp"

namespace netsum {

struct SwitchJobConfig {
    std::uint8_t job_number = 0;
    std::uint8_t epoch = 0;
    std::uint16_t slot_base = 0;
    std::uint32_t slots = 0;  // a power of two, at least 4
    std::uint32_t chunk_elems = 0;
    std::vector<Address> workers;  // by rank
};

// Where the machine puts what it sends. `datagram` of result and replay points into the slot and stays valid until
// flush() returns; the others must be copied by the sink before returning.
class SwitchSink {
  public:
    virtual ~SwitchSink() = default;
    virtual void result(std::uint8_t job_number, std::span<const std::uint8_t> datagram) = 0;  // to all workers
    virtual void replay(std::uint8_t job_number, const Address& worker, std::span<const std::uint8_t> datagram) = 0;
    virtual void answer(const Address& worker, std::span<const std::uint8_t> datagram) = 0;       // PENDING, PROBE
    virtual void probe_all(std::uint8_t job_number, std::span<const std::uint8_t> datagram) = 0;  // PROBE by multicast
    virtual void flush() = 0;  // called before a slot is claimed whose result may still be queued
};

// Counters of the switch and, one each, of a job. Never reset. Drop reasons are those of SPEC.md section 4, in its
// order.
enum class SwitchDrop : std::uint8_t {
    TooShort,
    BadType,
    UnknownSource,
    WrongJob,
    BadSizeCode,
    BadLength,
    StaleEpoch,
    BadSlot,
    SlotBusy,
    StaleNumber,
    KindMismatch,
    Count
};
struct SwitchCounters {
    std::uint64_t packets_in = 0;     // datagrams handled, dropped ones included
    std::uint64_t contributions = 0;  // claims and adds
    std::uint64_t results = 0;        // slots completed
    std::uint64_t replays = 0;
    std::uint64_t duplicates = 0;  // repeated contribution to an incomplete slot
    std::uint64_t probes = 0;
    std::array<std::uint64_t, static_cast<std::size_t>(SwitchDrop::Count)> drops{};
};

class SwitchMachine {
  public:
    SwitchMachine();
    ~SwitchMachine();
    void open_job(const SwitchJobConfig& config);  // throws std::invalid_argument: number taken, address taken, slots
                                                   // not a power of two, ...
    void close_job(std::uint8_t job_number);       // unknown numbers are ignored
    void set_multicast(std::uint8_t job_number, bool has_group);  // PROBEs are answered by multicast too
    void handle(std::span<const std::uint8_t> datagram, const Address& source, SwitchSink& sink);
    // The caller has sent everything that the sink was given (say, at the end of a batch). Optional: spares a needless
    // flush() later.
    void flushed();

    const SwitchCounters& counters() const;                      // all datagrams
    SwitchCounters job_counters(std::uint8_t job_number) const;  // those attributed to the job
    std::uint32_t slots_in_use(std::uint8_t job_number) const;   // claimed and incomplete
    // Ranks that have not contributed to the oldest incomplete slot (smallest number), empty when none is incomplete.
    std::vector<std::uint32_t> awaited_ranks(std::uint8_t job_number) const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace netsum
