#include "netsum/worker_machine.hpp"

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <stdexcept>
#include <utility>

#include "netsum/operation.hpp"
#include "netsum/window.hpp"
#include "netsum/wire.hpp"

namespace netsum {

namespace {

constexpr std::size_t kCacheLineBytes = 64;

void require_valid(const WorkerConfig& config) {
    if (config.slots < 4 || (config.slots & (config.slots - 1)) != 0 || config.slots > kMaxSlots ||
        config.slot_base + config.slots > kMaxSlots) {
        throw std::invalid_argument(std::to_string(config.slots) + " slots from " + std::to_string(config.slot_base) +
                                    ": a power of two, at least 4, within 15 bits");
    }
    if (size_code_of(config.chunk_elems) == 0) {
        throw std::invalid_argument("no size code for " + std::to_string(config.chunk_elems) + " elements");
    }
    if (config.rank >= config.world_size) {
        throw std::invalid_argument("rank " + std::to_string(config.rank) + " of " + std::to_string(config.world_size));
    }
    if (config.first_number % (2 * config.slots) != 0) {
        throw std::invalid_argument("first_number must be a multiple of 2 * slots");
    }
}

WindowConfig window_config(const WorkerConfig& config) {
    return {config.slots,      config.world_size,         config.initial_rto_us,      config.min_rto_us,
            config.max_rto_us, config.network_timeout_us, config.straggler_timeout_us};
}

std::string list_of(const std::vector<std::uint32_t>& ranks) {
    if (ranks.empty()) return "unknown";
    std::string text = "[";
    for (const std::uint32_t rank : ranks) text += (text.size() > 1 ? ", " : "") + std::to_string(rank);
    return text + "]";
}

MsgType type_of(const std::uint8_t* datagram) {
    return static_cast<MsgType>(datagram[0] >> 4);
}

}  // namespace

// Invariants: a slot has at most one packet outstanding; packets of a slot are sent in the order of their numbers;
// after a failure nothing is sent any more and every operation completes with an error.
struct WorkerMachine::Impl {
    explicit Impl(const WorkerConfig& worker_config);

    void submit(const OperationConfig& operation);
    void handle(std::span<const std::uint8_t> datagram, std::int64_t now_us);
    void poll(std::int64_t now_us, WorkerSink& sink);
    void fail(const Operation* culprit, WorkerError error, const std::string& detail,
              std::vector<std::uint32_t> missing_ranks = {});

    struct Slot {
        std::uint64_t next_number = 0;    // smallest unsent
        std::int64_t last_answered = -1;  // 24 bits; -1: none yet
    };

    std::uint8_t* image(std::uint32_t slot) { return images.data() + slot * image_stride_bytes; }
    std::span<const std::uint8_t> outstanding_datagram(std::uint32_t slot) {
        return {image(slot), datagram_bytes(type_of(image(slot)))};
    }
    std::size_t datagram_bytes(MsgType type) const {
        if (type == MsgType::Pending) return kHeaderBytes + (config.world_size + 7) / 8;
        return type == MsgType::Exponents ? exponents_bytes(config.chunk_elems) : data_bytes(config.chunk_elems);
    }

    std::optional<WorkerDrop> mismatch(std::span<const std::uint8_t> datagram) const;
    std::optional<WorkerDrop> receive(std::span<const std::uint8_t> datagram, std::int64_t now_us);
    void accept(std::uint32_t slot, std::uint64_t number, const std::uint8_t* datagram, std::int64_t now_us);
    bool send_next(std::uint32_t slot, std::int64_t now_us, WorkerSink& sink);
    void send(std::uint32_t slot, WorkerSink& sink);
    Operation* operation_of(std::uint64_t number);
    void assign_bases();
    void complete(const Operation& operation);
    void succeed(std::uint64_t operation_index);
    void fail_overdue(Overdue overdue);

    WorkerConfig config;
    Window window;
    std::vector<Slot> slots;
    std::size_t image_stride_bytes;
    std::vector<std::uint8_t> images;                   // by slot: what is outstanding, kept for resends
    std::deque<std::unique_ptr<Operation>> operations;  // unfinished, in program order
    std::size_t based = 0;                              // so many of them, from the front, have a base
    Operation* unsealed = nullptr;                      // the last one with a base, until it is sealed
    std::uint64_t next_base;                            // of the next operation, when none is unsealed
    std::uint64_t submitted = 0;
    std::deque<Completion> completions;
    WorkerCounters counters;
    bool failed = false;
};

WorkerMachine::Impl::Impl(const WorkerConfig& worker_config)
    : config((require_valid(worker_config), worker_config)),
      window(window_config(config)),
      slots(config.slots),
      image_stride_bytes((data_bytes(config.chunk_elems) + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes),
      images(config.slots * image_stride_bytes),
      next_base(config.first_number) {
    for (std::uint32_t slot = 0; slot < config.slots; ++slot) slots[slot].next_number = config.first_number + slot;
}

// -- input -----------------------------------------------------------------------------------------------------------

void WorkerMachine::Impl::submit(const OperationConfig& operation) {
    if (failed) {
        completions.push_back({operation.index, WorkerError::Aborted, {}, "an operation before this one failed"});
    } else if (operation.numel == 0) {
        succeed(operation.index);
    } else {
        operations.push_back(std::make_unique<Operation>(operation));
        assign_bases();
    }
}

void WorkerMachine::Impl::handle(std::span<const std::uint8_t> datagram, std::int64_t now_us) {
    ++counters.packets_in;
    counters.bytes_in += datagram.size();
    std::optional<WorkerDrop> reason = mismatch(datagram);
    if (!reason) reason = receive(datagram, now_us);
    if (reason) ++counters.drops[static_cast<std::size_t>(*reason)];
}

// Checks that need nothing but the configuration.
std::optional<WorkerDrop> WorkerMachine::Impl::mismatch(std::span<const std::uint8_t> datagram) const {
    const std::optional<Header> header = read_header(datagram.data(), datagram.size());
    if (!header) return WorkerDrop::TooShort;
    const auto type = static_cast<MsgType>(header->msg_type);
    if (type != MsgType::Data && type != MsgType::Pending && type != MsgType::Exponents) return WorkerDrop::BadType;
    if (header->job_number != config.job_number) return WorkerDrop::WrongJob;
    if (chunk_elems_of(header->size_code) != config.chunk_elems) return WorkerDrop::BadSizeCode;
    if (datagram.size() < datagram_bytes(type)) return WorkerDrop::BadLength;
    if (header->epoch() != config.epoch) return WorkerDrop::StaleEpoch;
    const std::uint32_t slot =
        std::uint32_t{header->slot()} - config.slot_base;  // wraps above `slots` when below slot_base
    if (slot >= config.slots || slot != header->number() % config.slots ||
        header->version() != header->number() / config.slots % 2) {
        return WorkerDrop::BadSlot;
    }
    return std::nullopt;
}

std::optional<WorkerDrop> WorkerMachine::Impl::receive(std::span<const std::uint8_t> datagram, std::int64_t now_us) {
    const Header header = *read_header(datagram.data(), datagram.size());
    const std::uint32_t slot = std::uint32_t{header.slot()} - config.slot_base;
    const auto type = static_cast<MsgType>(header.msg_type);
    const std::optional<std::uint64_t> number = window.number_at(slot);
    if (number && (*number & kNumberMask) == header.number()) {
        if (type == MsgType::Pending) {
            ++counters.pendings;
            window.pending(datagram.data() + kHeaderBytes, now_us);
            return std::nullopt;
        }
        if (type != type_of(image(slot))) return WorkerDrop::StaleNumber;
        accept(slot, *number, datagram.data(), now_us);
        return std::nullopt;
    }
    const bool repeated = type == MsgType::Pending || header.number() == slots[slot].last_answered;
    return repeated ? WorkerDrop::DuplicateResult : WorkerDrop::StaleNumber;
}

void WorkerMachine::Impl::accept(std::uint32_t slot, std::uint64_t number, const std::uint8_t* datagram,
                                 std::int64_t now_us) {
    ++counters.results;
    window.answered(slot, now_us);
    slots[slot].last_answered = static_cast<std::int64_t>(number & kNumberMask);
    Operation& operation = *operation_of(number);  // unfinished, as its packet was outstanding
    const std::uint8_t* payload =
        type_of(datagram) == MsgType::Data ? datagram + exponents_bytes(config.chunk_elems) : nullptr;
    switch (operation.accept(number - *operation.base, datagram + kHeaderBytes, payload)) {
        case Operation::Outcome::Ok:
            if (&operation == unsealed && operation.sealed()) assign_bases();
            if (operation.complete()) complete(operation);
            break;
        case Operation::Outcome::Integrity:
            fail(&operation, WorkerError::Integrity, operation.detail());
            break;
        case Operation::Outcome::Overflow:
            fail(&operation, WorkerError::Overflow, operation.detail());
            break;
    }
}

// -- output ----------------------------------------------------------------------------------------------------------

void WorkerMachine::Impl::poll(std::int64_t now_us, WorkerSink& sink) {
    if (failed) return;
    if (const auto overdue = window.overdue(now_us)) return fail_overdue(*overdue);
    for (const std::uint32_t slot : window.fast_retransmits(now_us)) {
        ++counters.fast_retransmits;
        send(slot, sink);
    }
    for (const std::uint32_t slot : window.timer_retransmits(now_us)) {
        ++counters.timer_retransmits;
        send(slot, sink);
    }
    // Sending the last payload chunk makes integrity chunks possible, also in slots that were passed already.
    for (bool sent_some = !operations.empty(); sent_some;) {
        sent_some = false;
        // From the slot that is furthest behind: packets leave in the order of their numbers, as results come back in
        // it.
        const auto behind = std::min_element(
            slots.begin(), slots.end(), [](const Slot& a, const Slot& b) { return a.next_number < b.next_number; });
        const auto first = static_cast<std::uint32_t>(behind - slots.begin());
        for (std::uint32_t i = 0; i < config.slots; ++i)
            sent_some |= send_next((first + i) % config.slots, now_us, sink);
    }
}

// The next packet of the slot, if it may be sent.
bool WorkerMachine::Impl::send_next(std::uint32_t slot, std::int64_t now_us, WorkerSink& sink) {
    if (window.number_at(slot)) return false;
    const std::uint64_t number = slots[slot].next_number;
    Operation* operation = operation_of(number);
    if (operation == nullptr || !operation->may_send(number - *operation->base)) return false;

    std::uint8_t* datagram = image(slot);
    std::uint8_t* payload = datagram + exponents_bytes(config.chunk_elems);
    auto kind = MsgType::Data;
    if (!operation->build(number - *operation->base, datagram + kHeaderBytes, payload)) {
        if (config.short_exponents) {
            kind = MsgType::Exponents;
        } else {
            std::memset(payload, 0, 4 * std::size_t{config.chunk_elems});
        }
    }
    Header header;
    header.msg_type = static_cast<std::uint8_t>(kind);
    header.size_code = static_cast<std::uint8_t>(size_code_of(config.chunk_elems));
    header.job_number = config.job_number;
    header.tsi = std::uint32_t{config.epoch} << 24 | static_cast<std::uint32_t>(number & kNumberMask);
    header.pool_index = static_cast<std::uint16_t>((number / config.slots % 2) << 15 | (config.slot_base + slot));
    write_header(header, datagram);

    slots[slot].next_number += config.slots;
    window.sent(slot, number, now_us);
    send(slot, sink);
    return true;
}

void WorkerMachine::Impl::send(std::uint32_t slot, WorkerSink& sink) {
    const auto datagram = outstanding_datagram(slot);
    ++counters.packets_out;
    counters.bytes_out += datagram.size();
    sink.send(datagram);
}

// -- operations ------------------------------------------------------------------------------------------------------

// Null when no operation is known to have that packet (yet).
Operation* WorkerMachine::Impl::operation_of(std::uint64_t number) {
    for (std::size_t i = 0; i < based; ++i) {
        Operation& operation = *operations[i];
        if (number >= *operation.base && number - *operation.base < operation.packets()) return &operation;
    }
    return nullptr;
}

// Gives each operation its first number as soon as the one before is sealed.
void WorkerMachine::Impl::assign_bases() {
    if (unsealed != nullptr && unsealed->sealed()) {
        next_base = *unsealed->base + unsealed->packets();
        unsealed = nullptr;
    }
    while (unsealed == nullptr && based < operations.size()) {
        Operation& operation = *operations[based++];
        operation.base = next_base;
        if (operation.sealed()) {
            next_base += operation.packets();
        } else {
            unsealed = &operation;
        }
    }
}

void WorkerMachine::Impl::complete(const Operation& operation) {
    counters.non_finite_blocks += operation.non_finite_blocks();
    succeed(operation.index());
    auto found = operations.begin();
    while (found->get() != &operation) ++found;
    operations.erase(found);
    --based;
}

void WorkerMachine::Impl::succeed(std::uint64_t operation_index) {
    ++counters.operations;
    completions.push_back({operation_index, WorkerError::None, {}, {}});
}

void WorkerMachine::Impl::fail_overdue(Overdue overdue) {
    const std::vector<std::uint32_t> waiting_for = window.waiting_for();
    const std::string outstanding = std::to_string(window.size()) + " packets outstanding";
    if (overdue == Overdue::SwitchSilent) {
        fail(operations.front().get(), WorkerError::SwitchSilent, outstanding + " and nothing heard from the switch",
             waiting_for);
    } else {
        fail(operations.front().get(), WorkerError::PeersMissing,
             outstanding + ", waiting for ranks " + list_of(waiting_for), waiting_for);
    }
}

void WorkerMachine::Impl::fail(const Operation* culprit, WorkerError error, const std::string& detail,
                               std::vector<std::uint32_t> missing_ranks) {
    failed = true;
    if (culprit != nullptr) completions.push_back({culprit->index(), error, std::move(missing_ranks), detail});
    for (const auto& operation : operations) {
        if (operation.get() != culprit) {
            completions.push_back({operation->index(), WorkerError::Aborted, {}, detail});
        }
        operation->poison();
    }
    window.clear();
    unsealed = nullptr;
    based = 0;
    operations.clear();
}

const char* error_name(WorkerError error) {
    constexpr std::array names{"none", "switch_silent", "peers_missing", "integrity", "overflow", "aborted"};
    return names[static_cast<std::size_t>(error)];
}

// -- interface -------------------------------------------------------------------------------------------------------

WorkerMachine::WorkerMachine(const WorkerConfig& config) : impl_(std::make_unique<Impl>(config)) {}
WorkerMachine::~WorkerMachine() = default;

std::uint64_t WorkerMachine::submit(void* data, std::uint64_t numel, DType dtype, OpCode op, std::int64_t) {
    const WorkerConfig& config = impl_->config;
    const std::uint64_t index = impl_->submitted++;
    impl_->submit({index, data, numel, dtype, op, config.slots, config.chunk_elems, config.world_size});
    return index;
}

void WorkerMachine::handle(std::span<const std::uint8_t> datagram, std::int64_t now_us) {
    impl_->handle(datagram, now_us);
}

void WorkerMachine::poll(std::int64_t now_us, WorkerSink& sink) {
    impl_->poll(now_us, sink);
}

std::optional<std::int64_t> WorkerMachine::next_deadline_us() const {
    return impl_->window.next_deadline_us();
}

std::optional<Completion> WorkerMachine::take_completion() {
    if (impl_->completions.empty()) return std::nullopt;
    Completion completion = std::move(impl_->completions.front());
    impl_->completions.pop_front();
    return completion;
}

void WorkerMachine::abort(const std::string& detail) {
    impl_->fail(nullptr, WorkerError::Aborted, detail);
}

bool WorkerMachine::failed() const {
    return impl_->failed;
}
const WorkerCounters& WorkerMachine::counters() const {
    return impl_->counters;
}
std::int64_t WorkerMachine::rto_us() const {
    return impl_->window.rtt().rto_us();
}
std::int64_t WorkerMachine::srtt_us() const {
    return impl_->window.rtt().srtt_us();
}
std::uint32_t WorkerMachine::outstanding() const {
    return impl_->window.size();
}
std::vector<std::uint32_t> WorkerMachine::awaited_ranks() const {
    return impl_->window.waiting_for();
}

}  // namespace netsum
