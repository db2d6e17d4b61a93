// NativeSwitch and NativeAgent together on loopback; the part of them that ThreadSanitizer should see.
#include <doctest/doctest.h>

#include <atomic>
#include <memory>
#include <thread>
#include <vector>

#include "netsum/agent_loop.hpp"
#include "netsum/switch_loop.hpp"

using namespace netsum;

namespace {

const Address kLoopback = parse_address("127.0.0.1", 0);
constexpr std::uint32_t kWorldSize = 4;
constexpr std::uint32_t kSlots = 16;
constexpr std::uint32_t kChunkElems = 256;
constexpr std::int64_t kWaitUs = 30'000'000;

using Agents = std::vector<std::unique_ptr<NativeAgent>>;

Agents start_job(NativeSwitch& native_switch, const std::optional<Address>& group, const FaultConfig* faults) {
    Agents agents;
    SwitchJobConfig job{1, 3, 0, kSlots, kChunkElems, {}};
    for (std::uint32_t rank = 0; rank < kWorldSize; ++rank) {
        agents.push_back(std::make_unique<NativeAgent>(kLoopback, 1 << 20));
        job.workers.push_back(agents.back()->address());
    }
    native_switch.open_job(job, group);
    for (auto& agent : agents) {
        if (faults) agent->set_faults(*faults);
        const auto answers = agent->probe({native_switch.address(), group, 1, kChunkElems, kWaitUs});
        CHECK(answers.unicast);
        CHECK(answers.multicast == group.has_value());
    }
    native_switch.set_results(1, group.has_value());
    WorkerConfig config;
    config.world_size = kWorldSize;
    config.job_number = 1;
    config.epoch = 3;
    config.slots = kSlots;
    config.chunk_elems = kChunkElems;
    for (auto& agent : agents) {
        agent->start(config, native_switch.address(), group.has_value());
        ++config.rank;
    }
    return agents;
}

void check_sums(Agents& agents, std::size_t numel, int operations) {
    std::vector<std::vector<std::int32_t>> tensors;
    for (int operation = 0; operation < operations; ++operation) {
        for (std::uint32_t rank = 0; rank < kWorldSize; ++rank) {
            auto& tensor = tensors.emplace_back(numel);
            for (std::size_t i = 0; i < numel; ++i) tensor[i] = static_cast<std::int32_t>(i * (rank + 1)) + operation;
        }
    }
    for (std::size_t i = 0; i < tensors.size(); ++i) {
        agents[i % kWorldSize]->submit(tensors[i].data(), numel, DType::Int32, OpCode::Sum);
    }
    for (auto& agent : agents) {
        for (int operation = 0; operation < operations; ++operation) {
            const auto completion = agent->next_completion(kWaitUs);
            REQUIRE(completion);
            CHECK(completion->error == WorkerError::None);
            CHECK(completion->operation == static_cast<std::uint64_t>(operation));
        }
    }
    for (std::size_t t = 0; t < tensors.size(); ++t) {
        std::size_t wrong = 0;
        for (std::size_t i = 0; i < numel; ++i) {
            wrong += tensors[t][i] != static_cast<std::int32_t>(i * 10) + static_cast<std::int32_t>(t / kWorldSize) * 4;
        }
        CHECK(wrong == 0);
    }
}

// Asks both for everything they tell, from another thread, for as long as it lives.
class Watcher {
  public:
    Watcher(NativeSwitch& native_switch, Agents& agents)
        : thread_([this, &native_switch, &agents] {
              while (!stopping_) {
                  native_switch.counters();
                  native_switch.awaited_ranks(1);
                  native_switch.slots_in_use(1);
                  for (auto& agent : agents) {
                      agent->counters();
                      agent->awaited_ranks();
                  }
                  std::this_thread::sleep_for(std::chrono::milliseconds(2));
              }
          }) {}
    ~Watcher() {
        stopping_ = true;
        thread_.join();
    }

  private:
    std::atomic<bool> stopping_ = false;
    std::thread thread_;
};

}  // namespace

TEST_CASE("four agents and a switch, watched from another thread") {
    NativeSwitch native_switch(kLoopback, 1 << 20, true);
    SUBCASE("unicast") {
        auto agents = start_job(native_switch, std::nullopt, nullptr);
        const Watcher watcher(native_switch, agents);
        check_sums(agents, 30'001, 3);
    }
    SUBCASE("multicast") {
        auto agents = start_job(native_switch, parse_address("239.255.77.40", 48840), nullptr);
        const Watcher watcher(native_switch, agents);
        check_sums(agents, 30'001, 3);
    }
    SUBCASE("with faults") {
        const FaultConfig faults{.seed = 9, .loss = 0.02, .duplicate = 0.02, .reorder = 0.02, .delay_max_us = 300};
        auto agents = start_job(native_switch, std::nullopt, &faults);
        const Watcher watcher(native_switch, agents);
        check_sums(agents, 30'001, 3);
    }
    CHECK(native_switch.slots_in_use(1) == 0);
}

TEST_CASE("closing in the middle of an operation, from two threads, with a waiter") {
    NativeSwitch native_switch(kLoopback, 1 << 20, false);
    auto agents = start_job(native_switch, std::nullopt, nullptr);
    std::vector<std::int32_t> tensor(1'000'000);
    agents[0]->submit(tensor.data(), tensor.size(), DType::Int32, OpCode::Sum);
    std::optional<Completion> completion;
    std::thread waiter([&] { completion = agents[0]->next_completion(kWaitUs); });
    std::thread closer([&] { agents[0]->close(); });
    agents[0]->close();
    closer.join();
    waiter.join();
    REQUIRE(completion);
    CHECK(completion->error == WorkerError::Aborted);
    native_switch.close();
    CHECK_THROWS_AS(native_switch.close_job(1), std::runtime_error);
}
