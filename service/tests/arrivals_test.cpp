// Whose message over gRPC gives way to others'.
#include <atomic>
#include <catch2/catch.hpp>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>

#include "clients.hpp"
#include "grpc_arrivals.hpp"
#include "memory_budget.hpp"

using namespace trtdet::serve;
using namespace std::chrono_literals;

namespace {

constexpr std::uint64_t mib = 1U << 20U;
constexpr std::uint64_t longest = 32 * mib;

class WaitingCall : public Arrival {
public:
    WaitingCall(MemoryBudget& budget, const std::shared_ptr<Client>& client)
        : held_(budget, client), client_(client->number) {}

    void read() override { asked = true; }
    void end(const grpc::Status& status) override {
        ended = status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED;
    }
    MemoryBudget::Share& held() const override { return held_; }
    std::uint64_t client() const override { return client_; }

    std::atomic<bool> asked{false};
    std::atomic<bool> ended{false};

private:
    mutable MemoryBudget::Share held_;
    const std::uint64_t client_;
};

// 128 MiB for all, 64 for a client.
struct Waiting {
    MemoryBudget budget{"the bodies", "--max-bodies-mb", 128 * mib, 64 * mib};
    Arrivals arrivals{longest, 16 * mib, 16 * mib, 10s};

    std::shared_ptr<WaitingCall> add(const std::shared_ptr<Client>& client) {
        auto call = std::make_shared<WaitingCall>(budget, client);
        REQUIRE(arrivals.add(call));
        return call;
    }
};

bool set_within(std::chrono::milliseconds time, const std::atomic<bool>& flag) {
    const auto until = std::chrono::steady_clock::now() + time;
    while (!flag && std::chrono::steady_clock::now() < until) {
        std::this_thread::sleep_for(5ms);
    }
    return flag;
}

}  // namespace

TEST_CASE("a message gives way to a client that holds less by half a message or more") {
    Waiting service;
    const auto first = std::make_shared<Client>(1), second = std::make_shared<Client>(2);
    const auto third = std::make_shared<Client>(3);
    MemoryBudget::Share of_first(service.budget, first), of_second(service.budget, second);
    of_first.set(16 * mib);
    of_second.set(12 * mib);
    const auto slow = service.add(first);
    const auto other = service.add(second);
    REQUIRE(slow->asked);
    REQUIRE(other->asked);
    const auto call = service.add(third);
    CHECK_FALSE(call->asked);
    CHECK(set_within(5s, slow->ended));
    CHECK_FALSE(other->ended);
    of_first.set(0);
    slow->held().set(0);  // as the call is gone
    CHECK(set_within(5s, call->asked));
    for (const auto& each : {other, call}) {
        service.arrivals.remove(*each);
    }
}

TEST_CASE("a message does not give way to a client that holds about as much") {
    Waiting service;
    const auto first = std::make_shared<Client>(1), second = std::make_shared<Client>(2);
    MemoryBudget::Share of_first(service.budget, first);
    of_first.set(2 * mib);
    const auto slow = service.add(first);
    const auto other = service.add(second);
    const auto another = service.add(second);
    REQUIRE(slow->asked);
    REQUIRE(other->asked);
    CHECK_FALSE(set_within(300ms, slow->ended));
    CHECK_FALSE(another->asked);
    // What was only waiting is asked for where there is room.
    REQUIRE(service.arrivals.remove(*slow));
    slow->held().set(0);
    REQUIRE(service.arrivals.remove(*other));
    other->held().set(0);
    CHECK(set_within(5s, another->asked));
    service.arrivals.remove(*another);
}
