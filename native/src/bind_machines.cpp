// netsum.native.SwitchMachine and WorkerMachine: the pure machines of the packet path, for tests and simulation (bytes
// in, bytes out).
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>
#include <unordered_map>
#include <utility>
#include <vector>

#include "bind.hpp"
#include "netsum/counters.hpp"
#include "netsum/switch_machine.hpp"
#include "netsum/worker_machine.hpp"

namespace nb = nanobind;
using namespace nb::literals;
using namespace netsum;

namespace {

using Array = nb::ndarray<nb::numpy, nb::ndim<1>, nb::c_contig, nb::device::cpu>;

std::span<const std::uint8_t> span_of(const nb::bytes& data) {
    return {reinterpret_cast<const std::uint8_t*>(data.c_str()), data.size()};
}

nb::bytes bytes_of(std::span<const std::uint8_t> datagram) {
    return nb::bytes(datagram.data(), datagram.size());
}

template <typename Counters>
CounterMap map_of(const Counters& counters) {
    CounterMap map;
    add_counters(map, counters);
    return map;
}

// (kind, job number or ip, 0 or port, datagram)
using Output = std::tuple<const char*, std::uint32_t, std::uint16_t, nb::bytes>;

class SwitchOutputs final : public SwitchSink {
  public:
    void result(std::uint8_t job_number, std::span<const std::uint8_t> datagram) override {
        outputs.emplace_back("result", job_number, 0, bytes_of(datagram));
    }
    void replay(std::uint8_t, const Address& worker, std::span<const std::uint8_t> datagram) override {
        outputs.emplace_back("replay", worker.ip, worker.port, bytes_of(datagram));
    }
    void answer(const Address& worker, std::span<const std::uint8_t> datagram) override {
        outputs.emplace_back("answer", worker.ip, worker.port, bytes_of(datagram));
    }
    void probe_all(std::uint8_t job_number, std::span<const std::uint8_t> datagram) override {
        outputs.emplace_back("probe_all", job_number, 0, bytes_of(datagram));
    }
    void flush() override {}  // datagrams are copied at once

    std::vector<Output> outputs;
};

class WorkerOutputs final : public WorkerSink {
  public:
    void send(std::span<const std::uint8_t> datagram) override { datagrams.push_back(bytes_of(datagram)); }

    std::vector<nb::bytes> datagrams;
};

// A WorkerMachine that holds on to the arrays of unfinished operations.
class PyWorkerMachine {
  public:
    using Taken = std::tuple<std::uint64_t, const char*, std::vector<std::uint32_t>, std::string>;

    explicit PyWorkerMachine(const WorkerConfig& config) : machine(config) {}

    std::uint64_t submit(const Array& array, int dtype_code, int op_code, std::int64_t now_us) {
        if (dtype_code < 1 || dtype_code > 4 || op_code < 1 || op_code > 2) {
            throw std::invalid_argument("dtype codes are 1 to 4, op codes 1 and 2");
        }
        const auto dtype = static_cast<DType>(dtype_code);
        if (array.itemsize() != dtype_bytes(dtype)) {
            throw std::invalid_argument("the array's item size is not that of the dtype code");
        }
        const auto index = machine.submit(array.data(), array.size(), dtype, static_cast<OpCode>(op_code), now_us);
        arrays_.emplace(index, array);
        return index;
    }

    std::optional<Taken> take_completion() {
        std::optional<Completion> completion = machine.take_completion();
        if (!completion) return std::nullopt;
        arrays_.erase(completion->operation);
        return Taken{completion->operation, error_name(completion->error), std::move(completion->missing_ranks),
                     std::move(completion->detail)};
    }

    WorkerMachine machine;

  private:
    std::unordered_map<std::uint64_t, Array> arrays_;  // by operation
};

void open_job(SwitchMachine& self, std::uint8_t job_number, std::uint8_t epoch, std::uint16_t slot_base,
              std::uint32_t slots, std::uint32_t chunk_elems,
              const std::vector<std::pair<std::uint32_t, std::uint16_t>>& workers) {
    SwitchJobConfig config{job_number, epoch, slot_base, slots, chunk_elems, {}};
    for (const auto& [ip, port] : workers) config.workers.push_back({ip, port});
    self.open_job(config);
}

void bind_switch_machine(nb::module_& module) {
    nb::class_<SwitchMachine>(
        module, "SwitchMachine",
        "The switch as a pure state machine: datagrams in, datagrams out. Addresses are integers.")
        .def(nb::init<>())
        .def("open_job", &open_job, nb::kw_only(), "job_number"_a, "epoch"_a, "slot_base"_a, "slots"_a, "chunk_elems"_a,
             "workers"_a, "workers: (ip, port) by rank. Raises ValueError.")
        .def("close_job", &SwitchMachine::close_job, "job_number"_a)
        .def("set_multicast", &SwitchMachine::set_multicast, "job_number"_a, "has_group"_a)
        .def(
            "handle",
            [](SwitchMachine& self, const nb::bytes& data, std::uint32_t ip, std::uint16_t port) {
                SwitchOutputs sink;
                self.handle(span_of(data), {ip, port}, sink);
                return std::move(sink.outputs);
            },
            "data"_a, "ip"_a, "port"_a,
            "Returns (kind, job number or ip, 0 or port, datagram); kind: result, replay, answer or probe_all.")
        .def("counters", [](const SwitchMachine& self) { return map_of(self.counters()); })
        .def(
            "job_counters",
            [](const SwitchMachine& self, std::uint8_t job_number) { return map_of(self.job_counters(job_number)); },
            "job_number"_a)
        .def("slots_in_use", &SwitchMachine::slots_in_use, "job_number"_a)
        .def("awaited_ranks", &SwitchMachine::awaited_ranks, "job_number"_a);
}

void bind_worker_machine(nb::module_& module) {
    const WorkerConfig defaults;
    nb::class_<PyWorkerMachine>(module, "WorkerMachine",
                                "One worker as a pure state machine: tensors and results in, contributions out.")
        .def(
            "__init__",
            [](PyWorkerMachine* self, std::uint32_t rank, std::uint32_t world_size, std::uint8_t job_number,
               std::uint8_t epoch, std::uint16_t slot_base, std::uint32_t slots, std::uint32_t chunk_elems,
               bool short_exponents, std::int64_t initial_rto_us, std::int64_t min_rto_us, std::int64_t max_rto_us,
               std::int64_t network_timeout_us, std::int64_t straggler_timeout_us, std::uint64_t first_number) {
                new (self) PyWorkerMachine({rank, world_size, job_number, epoch, slot_base, slots, chunk_elems,
                                            short_exponents, initial_rto_us, min_rto_us, max_rto_us, network_timeout_us,
                                            straggler_timeout_us, first_number});
            },
            nb::kw_only(), "rank"_a, "world_size"_a, "job_number"_a, "epoch"_a, "slot_base"_a, "slots"_a,
            "chunk_elems"_a, "short_exponents"_a = defaults.short_exponents,
            "initial_rto_us"_a = defaults.initial_rto_us, "min_rto_us"_a = defaults.min_rto_us,
            "max_rto_us"_a = defaults.max_rto_us, "network_timeout_us"_a = defaults.network_timeout_us,
            "straggler_timeout_us"_a = defaults.straggler_timeout_us, "first_number"_a = defaults.first_number)
        .def("submit", &PyWorkerMachine::submit, "array"_a.noconvert(), "dtype"_a, "op"_a, "now_us"_a,
             "Starts an allreduce of a 1-D array in place (bfloat16 as uint16); returns its index.")
        .def(
            "handle",
            [](PyWorkerMachine& self, const nb::bytes& data, std::int64_t now_us) {
                self.machine.handle(span_of(data), now_us);
            },
            "data"_a, "now_us"_a)
        .def(
            "poll",
            [](PyWorkerMachine& self, std::int64_t now_us) {
                WorkerOutputs sink;
                self.machine.poll(now_us, sink);
                return std::move(sink.datagrams);
            },
            "now_us"_a, "The datagrams to send now.")
        .def("next_deadline_us", [](const PyWorkerMachine& self) { return self.machine.next_deadline_us(); })
        .def("take_completion", &PyWorkerMachine::take_completion,
             "(operation, error name, missing ranks, detail) of an operation that is over, or None.")
        .def(
            "abort", [](PyWorkerMachine& self, const std::string& detail) { self.machine.abort(detail); }, "detail"_a)
        .def_prop_ro("failed", [](const PyWorkerMachine& self) { return self.machine.failed(); })
        .def("counters", [](const PyWorkerMachine& self) { return map_of(self.machine.counters()); })
        .def_prop_ro("rto_us", [](const PyWorkerMachine& self) { return self.machine.rto_us(); })
        .def_prop_ro("srtt_us", [](const PyWorkerMachine& self) { return self.machine.srtt_us(); })
        .def_prop_ro("outstanding", [](const PyWorkerMachine& self) { return self.machine.outstanding(); })
        .def_prop_ro("awaited_ranks", [](const PyWorkerMachine& self) { return self.machine.awaited_ranks(); });
}

}  // namespace

void bind_machines(nb::module_& module) {
    bind_switch_machine(module);
    bind_worker_machine(module);
}
