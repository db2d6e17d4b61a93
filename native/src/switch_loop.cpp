#include "netsum/switch_loop.hpp"

#include <exception>
#include <stdexcept>

#include "result_sender.hpp"

namespace netsum {

NativeSwitch::NativeSwitch(const Address& bind_to, int receive_buffer_bytes, bool multicast)
    : socket_(bind_to, {receive_buffer_bytes, receive_buffer_bytes, false}),
      sender_(std::make_unique<ResultSender>(socket_)),
      multicast_(multicast) {
    if (multicast_) socket_.send_multicast_from(bind_to.ip);
    thread_ = std::thread([this] { run(); });
}

NativeSwitch::~NativeSwitch() {
    close();
}

void NativeSwitch::close() {
    const std::lock_guard closing(closing_);
    stopping_ = true;
    wake_.wake();
    if (thread_.joinable()) thread_.join();
}

void NativeSwitch::require_open() const {
    if (stopping_) throw std::runtime_error("the switch at " + to_string(address()) + " is closed");
}

void NativeSwitch::open_job(const SwitchJobConfig& config, const std::optional<Address>& group) {
    require_open();
    if (group && !multicast_) throw std::invalid_argument("this switch was started without multicast");
    if (group && (group->ip >> 28) != 0xE)
        throw std::invalid_argument(to_string(*group) + " is not a multicast group (224.0.0.0 to 239.255.255.255)");
    const std::lock_guard lock(mutex_);
    machine_.open_job(config);
    machine_.set_multicast(config.job_number, group.has_value());
    sender_->open_job(config.job_number, config.workers, group);
}

void NativeSwitch::set_results(std::uint8_t job_number, bool multicast) {
    require_open();
    const std::lock_guard lock(mutex_);
    sender_->set_multicast(job_number, multicast);
}

void NativeSwitch::close_job(std::uint8_t job_number) {
    require_open();
    const std::lock_guard lock(mutex_);
    machine_.close_job(job_number);
    sender_->close_job(job_number);
}

CounterMap NativeSwitch::counters() {
    const std::lock_guard lock(mutex_);
    CounterMap map;
    add_counters(map, machine_.counters());
    add_counters(map, socket_.counters());
    map["internal_errors"] = internal_errors_;
    return map;
}

CounterMap NativeSwitch::job_counters(std::uint8_t job_number) {
    const std::lock_guard lock(mutex_);
    CounterMap map;
    add_counters(map, machine_.job_counters(job_number));
    return map;
}

std::uint32_t NativeSwitch::slots_in_use(std::uint8_t job_number) {
    const std::lock_guard lock(mutex_);
    return machine_.slots_in_use(job_number);
}

std::vector<std::uint32_t> NativeSwitch::awaited_ranks(std::uint8_t job_number) {
    const std::lock_guard lock(mutex_);
    return machine_.awaited_ranks(job_number);
}

std::size_t NativeSwitch::step() {
    const std::lock_guard lock(mutex_);
    std::size_t datagrams = 0;
    try {
        datagrams = socket_.receive([this](std::span<const std::uint8_t> datagram, const Address& source) {
            machine_.handle(datagram, source, *sender_);
        });
    } catch (const std::exception&) {  // a defect of ours: the rest of the batch is lost, the workers resend it
        ++internal_errors_;
    }
    sender_->flush();
    machine_.flushed();
    return datagrams;
}

void NativeSwitch::run() {
    while (!stopping_) {
        if (step() > 0) continue;
        pollfd descriptors[] = {{socket_.fd(), POLLIN, 0}, {wake_.fd(), POLLIN, 0}};
        sleep_until_readable(descriptors, kMaxSleepUs);
    }
}

}  // namespace netsum
