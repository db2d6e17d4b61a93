#include "netsum/counters.hpp"

#include <array>

namespace netsum {

namespace {

// In the order of the enums.
constexpr std::array kSwitchDropNames{"too_short",     "bad_type",     "unknown_source", "wrong_job",
                                      "bad_size_code", "bad_length",   "stale_epoch",    "bad_slot",
                                      "slot_busy",     "stale_number", "kind_mismatch"};
constexpr std::array kWorkerDropNames{"too_short",   "bad_type", "bad_size_code", "bad_length",       "wrong_job",
                                      "stale_epoch", "bad_slot", "stale_number",  "duplicate_result", "wrong_source"};
static_assert(kSwitchDropNames.size() == static_cast<std::size_t>(SwitchDrop::Count));
static_assert(kWorkerDropNames.size() == static_cast<std::size_t>(WorkerDrop::Count));

template <typename Names, typename Drops>
void add_drops(CounterMap& map, const Names& names, const Drops& drops) {
    for (std::size_t i = 0; i < names.size(); ++i) map[std::string("drop_") + names[i]] += drops[i];
}

}  // namespace

void add_counters(CounterMap& map, const SwitchCounters& counters) {
    map["packets_in"] += counters.packets_in;
    map["contributions"] += counters.contributions;
    map["results"] += counters.results;
    map["replays"] += counters.replays;
    map["duplicates"] += counters.duplicates;
    map["probes"] += counters.probes;
    add_drops(map, kSwitchDropNames, counters.drops);
}

void add_counters(CounterMap& map, const WorkerCounters& counters) {
    map["packets_out"] += counters.packets_out;
    map["bytes_out"] += counters.bytes_out;
    map["packets_in"] += counters.packets_in;
    map["bytes_in"] += counters.bytes_in;
    map["results"] += counters.results;
    map["fast_retransmits"] += counters.fast_retransmits;
    map["timer_retransmits"] += counters.timer_retransmits;
    map["pendings"] += counters.pendings;
    map["operations"] += counters.operations;
    map["non_finite_blocks"] += counters.non_finite_blocks;
    add_drops(map, kWorkerDropNames, counters.drops);
}

void add_counters(CounterMap& map, const UdpCounters& counters) {
    map["socket_datagrams_in"] += counters.datagrams_in;
    map["socket_bytes_in"] += counters.bytes_in;
    map["socket_syscalls_in"] += counters.syscalls_in;
    map["socket_datagrams_out"] += counters.datagrams_out;
    map["socket_bytes_out"] += counters.bytes_out;
    map["socket_syscalls_out"] += counters.syscalls_out;
    map["socket_truncated"] += counters.truncated;
    map["socket_receive_overflows"] += counters.receive_overflows;
    map["socket_refused"] += counters.refused;
    map["socket_send_dropped"] += counters.send_dropped;
    map["socket_gso_off"] += counters.gso_off;
}

void add_counters(CounterMap& map, const FaultCounters& counters, const char* direction) {
    const std::string prefix = std::string("fault_") + direction + "_";
    map[prefix + "lost"] += counters.lost;
    map[prefix + "duplicated"] += counters.duplicated;
    map[prefix + "reordered"] += counters.reordered;
    map[prefix + "delayed"] += counters.delayed;
    map[prefix + "corrupted"] += counters.corrupted;
}

}  // namespace netsum
