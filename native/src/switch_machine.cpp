#include "netsum/switch_machine.hpp"

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <unordered_map>
#include <utility>

#include "netsum/slot_pool.hpp"
#include "netsum/wire.hpp"

namespace netsum {

namespace {

std::uint64_t key_of(const Address& address) {
    return std::uint64_t{address.ip} << 16 | address.port;
}

bool is(std::uint8_t msg_type, MsgType wanted) {
    return msg_type == static_cast<std::uint8_t>(wanted);
}

struct Job {
    explicit Job(const SwitchJobConfig& job_config)
        : config(job_config),
          pool(job_config.slots, static_cast<std::uint32_t>(job_config.workers.size()), job_config.chunk_elems) {}

    SwitchJobConfig config;
    SlotPool pool;
    SwitchCounters counters;
    bool has_group = false;
};

struct Source {
    Job* job = nullptr;
    std::uint32_t rank = 0;
};

}  // namespace

struct SwitchMachine::Impl {
    std::array<std::unique_ptr<Job>, 256> jobs;         // by job number
    std::unordered_map<std::uint64_t, Source> sources;  // by address; an address belongs to at most one (job, rank)
    SwitchCounters counters;
    std::vector<std::uint8_t> scratch = std::vector<std::uint8_t>(kMaxDatagramBytes);  // PENDING and PROBE answers
    std::uint64_t flush_generation = 1;  // results marked with it may still be queued in the sink

    void count(Job& job, std::uint64_t SwitchCounters::* counter) {
        ++(counters.*counter);
        ++(job.counters.*counter);
    }
    void drop(SwitchDrop reason, Job* job = nullptr) {
        ++counters.drops[static_cast<std::size_t>(reason)];
        if (job != nullptr) ++job->counters.drops[static_cast<std::size_t>(reason)];
    }

    void handle(std::span<const std::uint8_t> datagram, const Address& source, SwitchSink& sink);
    static std::optional<SwitchDrop> mismatch(const SwitchJobConfig& config, const Header& header, std::size_t bytes);
    static bool names_a_slot(const SwitchJobConfig& config, const Header& header);
    void contribute(Source from, const Header& header, const std::uint8_t* datagram, const Address& source,
                    SwitchSink& sink);
    void emit_result(Job& job, Aggregator& aggregator, SwitchSink& sink);
    void answer_pending(Job& job, const Aggregator& aggregator, Header header, const Address& source, SwitchSink& sink);
    void answer_probe(Job& job, Header header, const Address& source, SwitchSink& sink);
};

// Checks against the job, as far as they come before PROBE is answered.
std::optional<SwitchDrop> SwitchMachine::Impl::mismatch(const SwitchJobConfig& config, const Header& header,
                                                        std::size_t bytes) {
    if (header.job_number != config.job_number) return SwitchDrop::WrongJob;
    if (chunk_elems_of(header.size_code) != config.chunk_elems) return SwitchDrop::BadSizeCode;
    const bool is_short = is(header.msg_type, MsgType::Exponents);
    if (bytes < (is_short ? exponents_bytes(config.chunk_elems) : data_bytes(config.chunk_elems))) {
        return SwitchDrop::BadLength;
    }
    return std::nullopt;
}

bool SwitchMachine::Impl::names_a_slot(const SwitchJobConfig& config, const Header& header) {
    const std::uint32_t slot =
        std::uint32_t{header.slot()} - config.slot_base;  // wraps above `slots` when below slot_base
    return slot < config.slots && slot == header.number() % config.slots &&
           header.version() == header.number() / config.slots % 2;
}

void SwitchMachine::Impl::handle(std::span<const std::uint8_t> datagram, const Address& source, SwitchSink& sink) {
    ++counters.packets_in;
    const std::optional<Header> header = read_header(datagram.data(), datagram.size());
    if (!header) return drop(SwitchDrop::TooShort);
    const bool is_probe = is(header->msg_type, MsgType::Probe);
    if (!is_probe && !is(header->msg_type, MsgType::Data) && !is(header->msg_type, MsgType::Exponents)) {
        return drop(SwitchDrop::BadType);
    }
    const auto known = sources.find(key_of(source));
    if (known == sources.end()) return drop(SwitchDrop::UnknownSource);
    Job& job = *known->second.job;
    ++job.counters.packets_in;
    if (const auto reason = mismatch(job.config, *header, datagram.size())) return drop(*reason, &job);
    if (is_probe) return answer_probe(job, *header, source, sink);
    if (header->epoch() != job.config.epoch) return drop(SwitchDrop::StaleEpoch, &job);
    if (!names_a_slot(job.config, *header)) return drop(SwitchDrop::BadSlot, &job);
    contribute(known->second, *header, datagram.data(), source, sink);
}

void SwitchMachine::Impl::contribute(Source from, const Header& header, const std::uint8_t* datagram,
                                     const Address& source, SwitchSink& sink) {
    Job& job = *from.job;
    Aggregator& aggregator = job.pool.at(std::uint32_t{header.slot()} - job.config.slot_base, header.version());
    switch (job.pool.judge(aggregator, header.number(), header.msg_type, from.rank)) {
        case Verdict::Claim:
            if (aggregator.emitted == flush_generation) {  // its result may be queued, and is sent in place
                sink.flush();
                ++flush_generation;
            }
            job.pool.claim(aggregator, header, from.rank, datagram);
            count(job, &SwitchCounters::contributions);
            return emit_result(job, aggregator, sink);  // complete at once in a job of one worker
        case Verdict::Add:
            job.pool.add(aggregator, from.rank, datagram);
            count(job, &SwitchCounters::contributions);
            return emit_result(job, aggregator, sink);
        case Verdict::Replay:
            count(job, &SwitchCounters::replays);
            aggregator.emitted = flush_generation;
            return sink.replay(job.config.job_number, source, job.pool.result(aggregator));
        case Verdict::Duplicate:
            return answer_pending(job, aggregator, header, source, sink);
        case Verdict::SlotBusy:
            return drop(SwitchDrop::SlotBusy, &job);
        case Verdict::StaleNumber:
            return drop(SwitchDrop::StaleNumber, &job);
        case Verdict::KindMismatch:
            return drop(SwitchDrop::KindMismatch, &job);
    }
}

void SwitchMachine::Impl::emit_result(Job& job, Aggregator& aggregator, SwitchSink& sink) {
    if (!job.pool.complete(aggregator)) return;
    count(job, &SwitchCounters::results);
    aggregator.emitted = flush_generation;
    sink.result(job.config.job_number, job.pool.result(aggregator));
}

void SwitchMachine::Impl::answer_pending(Job& job, const Aggregator& aggregator, Header header, const Address& source,
                                         SwitchSink& sink) {
    count(job, &SwitchCounters::duplicates);
    header.msg_type = static_cast<std::uint8_t>(MsgType::Pending);
    write_header(header, scratch.data());
    job.pool.missing_bitmap(aggregator, scratch.data() + kHeaderBytes);
    sink.answer(source, {scratch.data(), kHeaderBytes + (job.config.workers.size() + 7) / 8});
}

void SwitchMachine::Impl::answer_probe(Job& job, Header header, const Address& source, SwitchSink& sink) {
    count(job, &SwitchCounters::probes);
    const std::span<std::uint8_t> datagram(scratch.data(), data_bytes(job.config.chunk_elems));
    std::fill(datagram.begin(), datagram.end(), std::uint8_t{0});
    header.pool_index = 1;
    write_header(header, datagram.data());
    sink.answer(source, datagram);
    if (!job.has_group) return;
    header.pool_index = 2;
    write_header(header, datagram.data());
    sink.probe_all(job.config.job_number, datagram);
}

SwitchMachine::SwitchMachine() : impl_(std::make_unique<Impl>()) {}
SwitchMachine::~SwitchMachine() = default;

void SwitchMachine::open_job(const SwitchJobConfig& config) {
    if (impl_->jobs[config.job_number]) {
        throw std::invalid_argument("job number " + std::to_string(config.job_number) + " is taken");
    }
    if (config.slots < 4 || (config.slots & (config.slots - 1)) != 0) {
        throw std::invalid_argument(std::to_string(config.slots) + " slots: a power of two, at least 4, is needed");
    }
    if (config.slots > kMaxSlots || config.slot_base + config.slots > kMaxSlots) {
        throw std::invalid_argument(std::to_string(config.slots) + " slots from " + std::to_string(config.slot_base) +
                                    " do not fit 15 bits");
    }
    if (size_code_of(config.chunk_elems) == 0) {
        throw std::invalid_argument("no size code for " + std::to_string(config.chunk_elems) + " elements");
    }
    if (config.workers.empty()) throw std::invalid_argument("a job needs workers");
    std::unordered_map<std::uint64_t, Source> sources = impl_->sources;  // a copy, so that a refusal changes nothing
    auto job = std::make_unique<Job>(config);
    for (std::uint32_t rank = 0; rank < config.workers.size(); ++rank) {
        if (!sources.emplace(key_of(config.workers[rank]), Source{job.get(), rank}).second) {
            throw std::invalid_argument("the address of rank " + std::to_string(rank) + " belongs to another worker");
        }
    }
    const std::size_t pending_bytes = kHeaderBytes + (config.workers.size() + 7) / 8;
    if (impl_->scratch.size() < pending_bytes) impl_->scratch.resize(pending_bytes);
    impl_->sources = std::move(sources);
    impl_->jobs[config.job_number] = std::move(job);
}

void SwitchMachine::close_job(std::uint8_t job_number) {
    std::unique_ptr<Job>& job = impl_->jobs[job_number];
    if (!job) return;
    for (const Address& worker : job->config.workers) impl_->sources.erase(key_of(worker));
    job.reset();
}

void SwitchMachine::set_multicast(std::uint8_t job_number, bool has_group) {
    if (!impl_->jobs[job_number]) throw std::invalid_argument("no job " + std::to_string(job_number));
    impl_->jobs[job_number]->has_group = has_group;
}

void SwitchMachine::handle(std::span<const std::uint8_t> datagram, const Address& source, SwitchSink& sink) {
    impl_->handle(datagram, source, sink);
}

void SwitchMachine::flushed() {
    ++impl_->flush_generation;
}

const SwitchCounters& SwitchMachine::counters() const {
    return impl_->counters;
}

SwitchCounters SwitchMachine::job_counters(std::uint8_t job_number) const {
    const Job* job = impl_->jobs[job_number].get();
    return job != nullptr ? job->counters : SwitchCounters{};
}

std::uint32_t SwitchMachine::slots_in_use(std::uint8_t job_number) const {
    const Job* job = impl_->jobs[job_number].get();
    return job != nullptr ? job->pool.in_use() : 0;
}

std::vector<std::uint32_t> SwitchMachine::awaited_ranks(std::uint8_t job_number) const {
    const Job* job = impl_->jobs[job_number].get();
    return job != nullptr ? job->pool.awaited_ranks() : std::vector<std::uint32_t>{};
}

}  // namespace netsum
