// Counters under the names that status, metrics and tests know them by.
#pragma once

#include <cstdint>
#include <map>
#include <string>

#include "netsum/faults.hpp"
#include "netsum/switch_machine.hpp"
#include "netsum/udp.hpp"
#include "netsum/worker_machine.hpp"

namespace netsum {

using CounterMap = std::map<std::string, std::uint64_t>;

// Each adds to what the map already holds, so that two sockets of one agent give one sum.
void add_counters(CounterMap& map, const SwitchCounters& counters);  // packets_in, ..., drop_<reason>
void add_counters(CounterMap& map, const WorkerCounters& counters);  // packets_out, ..., drop_<reason>
void add_counters(CounterMap& map, const UdpCounters& counters);     // socket_<name>
void add_counters(CounterMap& map, const FaultCounters& counters, const char* direction);  // fault_<direction>_<name>

}  // namespace netsum
