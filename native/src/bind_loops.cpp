// netsum.native.NativeSwitch and NativeAgent. The GIL is released around everything that can wait.
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <optional>
#include <stdexcept>
#include <system_error>
#include <tuple>
#include <utility>

#include "bind.hpp"
#include "netsum/agent_loop.hpp"
#include "netsum/switch_loop.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace netsum;

namespace {

using Endpoint = std::pair<std::string, std::uint16_t>;
using NoGil = nb::call_guard<nb::gil_scoped_release>;

Address address_of(const Endpoint& endpoint) {
    return parse_address(endpoint.first, endpoint.second);
}

std::optional<Address> address_of(const std::optional<Endpoint>& endpoint) {
    return endpoint ? std::optional(address_of(*endpoint)) : std::nullopt;
}

Endpoint endpoint_of(const Address& address) {
    return {host_of(address), address.port};
}

void open_job(NativeSwitch& self, std::uint8_t job_number, std::uint8_t epoch, std::uint16_t slot_base,
              std::uint32_t slots, std::uint32_t chunk_elems, const std::vector<Endpoint>& workers,
              const std::optional<Endpoint>& multicast) {
    SwitchJobConfig config{job_number, epoch, slot_base, slots, chunk_elems, {}};
    for (const Endpoint& worker : workers) config.workers.push_back(address_of(worker));
    self.open_job(config, address_of(multicast));
}

std::pair<bool, bool> probe(NativeAgent& self, const std::string& switch_host, std::uint16_t switch_port,
                            const std::optional<Endpoint>& multicast, std::uint8_t job_number,
                            std::uint32_t chunk_elems, std::int64_t timeout_us) {
    const ProbeAnswers answers = self.probe(
        {parse_address(switch_host, switch_port), address_of(multicast), job_number, chunk_elems, timeout_us});
    return {answers.unicast, answers.multicast};
}

void start(NativeAgent& self, const std::string& switch_host, std::uint16_t switch_port, bool multicast,
           std::uint32_t rank, std::uint32_t world_size, std::uint8_t job_number, std::uint8_t epoch,
           std::uint16_t slot_base, std::uint32_t slots, std::uint32_t chunk_elems, bool short_exponents,
           std::int64_t network_timeout_us, std::int64_t straggler_timeout_us) {
    WorkerConfig config;
    config.rank = rank;
    config.world_size = world_size;
    config.job_number = job_number;
    config.epoch = epoch;
    config.slot_base = slot_base;
    config.slots = slots;
    config.chunk_elems = chunk_elems;
    config.short_exponents = short_exponents;
    config.network_timeout_us = network_timeout_us;
    config.straggler_timeout_us = straggler_timeout_us;
    self.start(config, parse_address(switch_host, switch_port), multicast);
}

std::uint64_t submit(NativeAgent& self, std::uintptr_t pointer, std::uint64_t numel, int dtype, int op) {
    if (dtype < 1 || dtype > 4)
        throw std::invalid_argument("dtype " + std::to_string(dtype) + " is not a dtype code (1..4)");
    if (op < 1 || op > 2) throw std::invalid_argument("op " + std::to_string(op) + " is not an op code (1..2)");
    return self.submit(reinterpret_cast<void*>(pointer), numel, static_cast<DType>(dtype), static_cast<OpCode>(op));
}

using CompletionTuple = std::tuple<std::uint64_t, std::string, std::vector<std::uint32_t>, std::string>;

std::optional<CompletionTuple> next_completion(NativeAgent& self, std::int64_t timeout_us) {
    auto completion = self.next_completion(timeout_us);
    if (!completion) return std::nullopt;
    return CompletionTuple{completion->operation, error_name(completion->error), std::move(completion->missing_ranks),
                           std::move(completion->detail)};
}

void set_faults(NativeAgent& self, std::uint64_t seed, double loss, double duplicate, double reorder,
                std::int64_t delay_min_us, std::int64_t delay_max_us, double corrupt) {
    self.set_faults({seed, loss, duplicate, reorder, corrupt, delay_min_us, delay_max_us});
}

void bind_switch(nb::module_& module) {
    nb::class_<NativeSwitch>(module, "NativeSwitch", "The software switch's data path: a socket and a thread.")
        .def(
            "__init__",
            [](NativeSwitch* self, const std::string& host, std::uint16_t port, int receive_buffer_bytes,
               bool multicast) { new (self) NativeSwitch(parse_address(host, port), receive_buffer_bytes, multicast); },
            "host"_a, "port"_a, "receive_buffer_bytes"_a = 4 << 20, "multicast"_a = true)
        .def_prop_ro("address", [](const NativeSwitch& self) { return endpoint_of(self.address()); })
        .def_prop_ro("receive_buffer_granted_bytes", &NativeSwitch::receive_buffer_granted_bytes)
        .def("open_job", &open_job, nb::kw_only(), "job_number"_a, "epoch"_a, "slot_base"_a, "slots"_a, "chunk_elems"_a,
             "workers"_a, "multicast"_a.none(), NoGil())
        .def("set_results", &NativeSwitch::set_results, "job_number"_a, "multicast"_a, NoGil())
        .def("close_job", &NativeSwitch::close_job, "job_number"_a, NoGil())
        .def("counters", &NativeSwitch::counters, NoGil())
        .def("job_counters", &NativeSwitch::job_counters, "job_number"_a, NoGil())
        .def("slots_in_use", &NativeSwitch::slots_in_use, "job_number"_a, NoGil())
        .def("awaited_ranks", &NativeSwitch::awaited_ranks, "job_number"_a, NoGil())
        .def("close", &NativeSwitch::close, NoGil());
}

void bind_agent(nb::module_& module) {
    nb::class_<NativeAgent>(module, "NativeAgent", "A worker's data path: its sockets, its window and a thread.")
        .def(
            "__init__",
            [](NativeAgent* self, const std::string& host, std::uint16_t port, int receive_buffer_bytes) {
                new (self) NativeAgent(parse_address(host, port), receive_buffer_bytes);
            },
            "host"_a, "port"_a = 0, "receive_buffer_bytes"_a = 4 << 20)
        .def_prop_ro("address", [](const NativeAgent& self) { return endpoint_of(self.address()); })
        .def(
            "path_mtu",
            [](const NativeAgent&, const std::string& host, std::uint16_t port) {
                return path_mtu(parse_address(host, port));
            },
            "host"_a, "port"_a)
        .def("set_faults", &set_faults, nb::kw_only(), "seed"_a, "loss"_a = 0.0, "duplicate"_a = 0.0, "reorder"_a = 0.0,
             "delay_min_us"_a = 0, "delay_max_us"_a = 0, "corrupt"_a = 0.0, NoGil())
        .def("probe", &probe, nb::kw_only(), "switch_host"_a, "switch_port"_a, "multicast"_a.none(), "job_number"_a,
             "chunk_elems"_a, "timeout_us"_a, NoGil())
        .def("start", &start, nb::kw_only(), "switch_host"_a, "switch_port"_a, "multicast"_a, "rank"_a, "world_size"_a,
             "job_number"_a, "epoch"_a, "slot_base"_a, "slots"_a, "chunk_elems"_a, "short_exponents"_a,
             "network_timeout_us"_a, "straggler_timeout_us"_a, NoGil())
        .def("submit", &submit, "pointer"_a, "numel"_a, "dtype"_a, "op"_a, NoGil())
        .def("next_completion", &next_completion, "timeout_us"_a, NoGil())
        .def("abort", &NativeAgent::abort, "detail"_a, NoGil())
        .def("counters", &NativeAgent::counters, NoGil())
        .def("awaited_ranks", &NativeAgent::awaited_ranks, NoGil())
        .def("close", &NativeAgent::close, NoGil());
}

}  // namespace

void bind_loops(nb::module_& module) {
    // A failed socket is an OSError with its errno, as Python's own sockets raise it.
    nb::register_exception_translator([](const std::exception_ptr& error, void*) {
        try {
            std::rethrow_exception(error);
        } catch (const std::system_error& failed) {
            const nb::object args = nb::make_tuple(failed.code().value(), failed.what());
            PyErr_SetObject(PyExc_OSError, args.ptr());
        }
    });
    bind_switch(module);
    bind_agent(module);
}
