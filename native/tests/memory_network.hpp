// Workers and a switch of one job wired together in memory, in virtual time, with seeded faults.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <span>
#include <utility>
#include <vector>

#include "netsum/switch_machine.hpp"
#include "netsum/worker_machine.hpp"

namespace netsum::testing {

using Bytes = std::vector<std::uint8_t>;

struct LinkFaults {
    double loss = 0;
    double duplicate = 0;
    std::int64_t delay_min_us = 20;
    std::int64_t delay_max_us = 20;  // above the least: reorders
};

struct JobShape {
    std::uint32_t world_size = 4;
    std::uint32_t slots = 8;
    std::uint32_t chunk_elems = 256;
    bool short_exponents = true;
    std::uint64_t first_number = 0;
    std::int64_t straggler_timeout_us = 30'000'000;
    LinkFaults faults;
    std::uint64_t seed = 1;
};

class MemoryNetwork : public SwitchSink {
  public:
    static constexpr std::uint8_t kJob = 3;
    static constexpr std::uint8_t kEpoch = 5;
    static constexpr std::uint16_t kSlotBase = 16;

    explicit MemoryNetwork(const JobShape& shape) : shape_(shape), random_(shape.seed) {
        SwitchJobConfig job{kJob, kEpoch, kSlotBase, shape.slots, shape.chunk_elems, {}};
        for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) job.workers.push_back(address_of(rank));
        the_switch.open_job(job);
        for (std::uint32_t rank = 0; rank < shape.world_size; ++rank) {
            WorkerConfig config;
            config.rank = rank;
            config.world_size = shape.world_size;
            config.job_number = kJob;
            config.epoch = kEpoch;
            config.slot_base = kSlotBase;
            config.slots = shape.slots;
            config.chunk_elems = shape.chunk_elems;
            config.short_exponents = shape.short_exponents;
            config.first_number = shape.first_number;
            config.straggler_timeout_us = shape.straggler_timeout_us;
            workers.push_back(std::make_unique<WorkerMachine>(config));
        }
        completions.resize(shape.world_size);
    }

    static Address address_of(std::uint32_t rank) { return {0x0A000001 + rank, 4000}; }

    void at(std::int64_t time_us, std::function<void()> action) { events_.emplace(time_us, std::move(action)); }

    // Runs until every rank has `operations` completions, or until `limit_us`. Returns whether they have.
    bool run(std::size_t operations, std::int64_t limit_us = 60'000'000) {
        for (;;) {
            for (std::uint32_t rank = 0; rank < workers.size(); ++rank) poll(rank);
            if (std::all_of(completions.begin(), completions.end(),
                            [&](const auto& of_rank) { return of_rank.size() >= operations; })) {
                return true;
            }
            std::int64_t next_us = events_.empty() ? INT64_MAX : events_.begin()->first;
            for (const auto& worker : workers)
                next_us = std::min(next_us, worker->next_deadline_us().value_or(INT64_MAX));
            if (next_us > limit_us) {
                now_us = limit_us;
                return false;
            }
            now_us = std::max(now_us, next_us);
            while (!events_.empty() && events_.begin()->first <= now_us) {
                const auto action = std::move(events_.begin()->second);
                events_.erase(events_.begin());
                action();
            }
        }
    }

    // What the switch sends, towards the workers.
    void result(std::uint8_t, std::span<const std::uint8_t> datagram) override {
        for (std::uint32_t rank = 0; rank < workers.size(); ++rank) to_worker(rank, datagram);
    }
    void replay(std::uint8_t, const Address& worker, std::span<const std::uint8_t> datagram) override {
        to_worker(worker.ip - address_of(0).ip, datagram);
    }
    void answer(const Address& worker, std::span<const std::uint8_t> datagram) override {
        to_worker(worker.ip - address_of(0).ip, datagram);
    }
    void probe_all(std::uint8_t, std::span<const std::uint8_t>) override {}
    void flush() override {}

    std::int64_t now_us = 0;
    SwitchMachine the_switch;
    std::vector<std::unique_ptr<WorkerMachine>> workers;
    std::vector<std::vector<Completion>> completions;  // by rank
    // Sees every result on its way to a worker, may change it; false loses it.
    std::function<bool(std::uint32_t rank, Bytes& datagram)> tamper;
    std::function<bool(std::uint32_t rank)> cut;  // true: nothing passes between this rank and the switch

  private:
    struct Sender final : WorkerSink {
        Sender(MemoryNetwork& to, std::uint32_t from) : network(to), rank(from) {}
        void send(std::span<const std::uint8_t> datagram) override { network.to_switch(rank, datagram); }
        MemoryNetwork& network;
        std::uint32_t rank;
    };

    void poll(std::uint32_t rank) {
        Sender sender(*this, rank);
        workers[rank]->poll(now_us, sender);
        while (auto completion = workers[rank]->take_completion()) completions[rank].push_back(*std::move(completion));
    }
    void to_switch(std::uint32_t rank, std::span<const std::uint8_t> datagram) {
        if (cut && cut(rank)) return;
        deliver([this, rank, copy = Bytes(datagram.begin(), datagram.end())] {
            the_switch.handle(copy, address_of(rank), *this);
        });
    }
    void to_worker(std::uint32_t rank, std::span<const std::uint8_t> datagram) {
        Bytes copy(datagram.begin(), datagram.end());
        if ((cut && cut(rank)) || (tamper && !tamper(rank, copy))) return;
        deliver([this, rank, copy = std::move(copy)] { workers[rank]->handle(copy, now_us); });
    }
    void deliver(const std::function<void()>& action) {
        if (chance(shape_.faults.loss)) return;
        const int copies = chance(shape_.faults.duplicate) ? 2 : 1;
        std::uniform_int_distribution<std::int64_t> delay_us(shape_.faults.delay_min_us, shape_.faults.delay_max_us);
        for (int i = 0; i < copies; ++i) at(now_us + delay_us(random_), action);
    }
    bool chance(double probability) { return std::uniform_real_distribution<double>(0, 1)(random_) < probability; }

    JobShape shape_;
    std::mt19937_64 random_;
    std::multimap<std::int64_t, std::function<void()>> events_;  // equal times: in the order of their insertion
};

}  // namespace netsum::testing
