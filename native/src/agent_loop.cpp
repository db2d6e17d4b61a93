#include "netsum/agent_loop.hpp"

#include <chrono>
#include <exception>
#include <stdexcept>

#include "netsum/float_mode.hpp"

namespace netsum {

namespace {

// The incoming direction draws other random numbers than the outgoing one.
constexpr std::uint64_t kIncomingSeedOffset = 0x9E3779B97F4A7C15u;

}  // namespace

// From the machine to the switch, through the fault injector where there is one.
class NativeAgent::Sender final : public WorkerSink {
  public:
    Sender(NativeAgent& agent, std::int64_t now_us) : agent_(agent), now_us_(now_us) {}

    void send(std::span<const std::uint8_t> datagram) override {
        if (agent_.faults_out_) {
            agent_.faults_out_->offer(datagram, agent_.switch_address_, now_us_, queue_);
        } else {
            agent_.unicast_.queue(datagram, agent_.switch_address_);
        }
    }
    void flush() {
        if (agent_.faults_out_) agent_.faults_out_->release_due(now_us_, queue_);
        agent_.unicast_.flush();
        if (agent_.faults_out_) agent_.faults_out_->recycle();
    }

  private:
    NativeAgent& agent_;
    std::int64_t now_us_;
    const FaultInjector::Deliver queue_ = [this](std::span<const std::uint8_t> datagram, const Address& destination) {
        agent_.unicast_.queue(datagram, destination);
    };
};

NativeAgent::NativeAgent(const Address& bind_to, int receive_buffer_bytes)
    : unicast_(bind_to, {receive_buffer_bytes, receive_buffer_bytes, false}),
      receive_buffer_bytes_(receive_buffer_bytes) {}

NativeAgent::~NativeAgent() {
    close();
}

void NativeAgent::require_not_started(const char* what) const {
    if (machine_ || stopping_) throw std::runtime_error(std::string(what) + " comes before start() and close()");
}

void NativeAgent::set_faults(const FaultConfig& config) {
    const std::lock_guard lock(mutex_);
    require_not_started("set_faults");
    faults_out_ = std::make_unique<FaultInjector>(config);
    FaultConfig incoming = config;
    incoming.seed += kIncomingSeedOffset;
    faults_in_ = std::make_unique<FaultInjector>(incoming);
}

void NativeAgent::start(const WorkerConfig& config, const Address& switch_address, bool multicast) {
    const std::lock_guard lock(mutex_);
    require_not_started("start");
    if (multicast && !multicast_) throw std::runtime_error("results by multicast need a group: probe() with one first");
    if (!multicast) multicast_.reset();
    // Late answers to probes, of this worker or (in the group) of others.
    const auto discard = [](std::span<const std::uint8_t>, const Address&) {};
    while (unicast_.receive(discard) > 0) continue;
    while (multicast_ && multicast_->receive(discard) > 0) continue;
    switch_address_ = switch_address;
    machine_ = std::make_unique<WorkerMachine>(config);
    thread_ = std::thread([this] { run(); });
}

std::uint64_t NativeAgent::submit(void* data, std::uint64_t numel, DType dtype, OpCode op) {
    std::uint64_t operation = 0;
    {
        const std::lock_guard lock(mutex_);
        if (!machine_ || stopping_) throw std::runtime_error("submit() comes after start() and before close()");
        operation = machine_->submit(data, numel, dtype, op, monotonic_us());
    }
    wake_.wake();
    return operation;
}

void NativeAgent::abort(const std::string& detail) {
    const std::lock_guard lock(mutex_);
    if (!machine_) return;
    machine_->abort(detail);
    publish_completions();
}

std::optional<Completion> NativeAgent::next_completion(std::int64_t timeout_us) {
    std::unique_lock lock(completions_mutex_);
    completed_.wait_for(lock, std::chrono::microseconds(timeout_us),
                        [this] { return closed_ || !completions_.empty(); });
    if (completions_.empty()) return std::nullopt;
    Completion completion = std::move(completions_.front());
    completions_.pop_front();
    return completion;
}

void NativeAgent::publish_completions() {
    while (auto completion = machine_->take_completion()) {
        {
            const std::lock_guard lock(completions_mutex_);
            completions_.push_back(std::move(*completion));
        }
        completed_.notify_one();
    }
}

CounterMap NativeAgent::counters() {
    const std::lock_guard lock(mutex_);
    CounterMap map;
    add_counters(map, machine_ ? machine_->counters() : WorkerCounters{});
    map["drop_wrong_source"] += wrong_source_;
    map["rto_us"] = machine_ ? static_cast<std::uint64_t>(machine_->rto_us()) : 0;
    map["srtt_us"] = machine_ ? static_cast<std::uint64_t>(machine_->srtt_us()) : 0;
    map["outstanding"] = machine_ ? machine_->outstanding() : 0;
    add_counters(map, unicast_.counters());
    if (multicast_) add_counters(map, multicast_->counters());
    add_counters(map, faults_in_ ? faults_in_->counters() : FaultCounters{}, "in");
    add_counters(map, faults_out_ ? faults_out_->counters() : FaultCounters{}, "out");
    return map;
}

std::vector<std::uint32_t> NativeAgent::awaited_ranks() {
    const std::lock_guard lock(mutex_);
    return machine_ ? machine_->awaited_ranks() : std::vector<std::uint32_t>{};
}

void NativeAgent::close() {
    const std::lock_guard closing(closing_);
    stopping_ = true;
    wake_.wake();
    {
        const std::lock_guard no_longer_starting(mutex_);
    }
    if (thread_.joinable()) thread_.join();
    abort("the agent was closed");
    {
        const std::lock_guard lock(completions_mutex_);
        closed_ = true;
    }
    completed_.notify_all();
}

void NativeAgent::handle(std::span<const std::uint8_t> datagram, const Address& source, std::int64_t now_us) {
    if (source != switch_address_) {
        ++wrong_source_;
        return;
    }
    machine_->handle(datagram, now_us);
}

std::size_t NativeAgent::receive(UdpSocket& socket, std::int64_t now_us) {
    if (!faults_in_) {
        return socket.receive(
            [&](std::span<const std::uint8_t> datagram, const Address& source) { handle(datagram, source, now_us); });
    }
    const FaultInjector::Deliver deliver = [&](std::span<const std::uint8_t> datagram, const Address& source) {
        handle(datagram, source, now_us);
    };
    const std::size_t datagrams = socket.receive([&](std::span<const std::uint8_t> datagram, const Address& source) {
        faults_in_->offer(datagram, source, now_us, deliver);
    });
    faults_in_->release_due(now_us, deliver);
    faults_in_->recycle();
    return datagrams;
}

std::size_t NativeAgent::step() {
    const std::lock_guard lock(mutex_);
    std::size_t datagrams = 0;
    Sender sender(*this, monotonic_us());
    try {
        if (multicast_) datagrams += receive(*multicast_, monotonic_us());
        datagrams += receive(unicast_, monotonic_us());
        machine_->poll(monotonic_us(), sender);
    } catch (const std::exception& error) {  // a defect of ours: better an error for the caller than a dead thread
        machine_->abort(std::string("internal error: ") + error.what());
    }
    sender.flush();  // datagrams point into slots that the next handle() may change
    publish_completions();
    return datagrams;
}

std::int64_t NativeAgent::sleep_us() {
    const std::lock_guard lock(mutex_);
    const std::int64_t now_us = monotonic_us();
    std::int64_t until_us = now_us + kMaxSleepUs;
    const auto earlier = [&](const std::optional<std::int64_t>& due_us) {
        if (due_us) until_us = std::min(until_us, *due_us);
    };
    earlier(machine_->next_deadline_us());
    if (faults_in_) earlier(faults_in_->next_due_us());
    if (faults_out_) earlier(faults_out_->next_due_us());
    return until_us - now_us;
}

void NativeAgent::run() {
    const DefaultFloatMode float_mode;  // a thread inherits its creator's
    while (!stopping_) {
        if (step() > 0) continue;
        pollfd descriptors[] = {
            {wake_.fd(), POLLIN, 0}, {unicast_.fd(), POLLIN, 0}, {multicast_ ? multicast_->fd() : -1, POLLIN, 0}};
        sleep_until_readable(descriptors, sleep_us());
        if (descriptors[0].revents) wake_.clear();
    }
}

}  // namespace netsum
