// The addresses that requests come from, and what each of them has of what all share.
#pragma once

#include <atomic>
#include <boost/asio/ip/address.hpp>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>

namespace trtdet::serve {

// How often a client may be refused what it asks too much of: so many times at once, and so many in each second after
// that. To refuse costs time too, and whoever goes on without waiting takes it from others. Any thread may call any
// member at any time.
class Refusals {
public:
    static constexpr double most = 500;
    // Of a connection over gRPC, at a time.
    static constexpr int calls = 100;

    // Counts a refusal. Returns whether that was one too many: its connection is to be ended.
    bool add();

    // It sends what belongs to no call: that counts as many.
    void add_flood();

    // Whether the client may connect: where it was refused often a short while ago, only a few times a second.
    bool may_connect();

    // Whether it is as if there had been none.
    bool forgiven();

private:
    void refill();

    std::mutex mutex_;
    double left_ = most;
    std::chrono::steady_clock::time_point at_ = std::chrono::steady_clock::now();
};

// One address. Whoever does something for it holds it.
struct Client {
    explicit Client(std::uint64_t which, std::shared_ptr<Refusals> until_now = std::make_shared<Refusals>())
        : number(which), refusals(std::move(until_now)) {}

    const std::uint64_t number;  // from 1, never the same again
    std::atomic<std::size_t> connections{0};
    std::atomic<std::size_t> requests{0};      // that are worked on
    std::atomic<std::size_t> images{0};        // of these, between the start of decoding and what was found
    const std::shared_ptr<Refusals> refusals;  // of calls over gRPC
};

// Any thread may call any member at any time.
class Clients {
public:
    // The same for the same address as long as anybody holds it. Of IPv6 the first 64 bits count: who has one address
    // has all of these.
    std::shared_ptr<Client> of(const boost::asio::ip::address& address);

private:
    // Its refusals are known for longer than it is, as it may come back at once.
    struct Known {
        std::weak_ptr<Client> client;
        std::shared_ptr<Refusals> refusals = std::make_shared<Refusals>();
    };

    std::mutex mutex_;
    std::unordered_map<std::string, Known> known_;
    std::size_t sweep_at_ = 64;  // how many are known when those that are gone are forgotten
    std::uint64_t last_ = 0;
};

// The part of a limit that one client may have: at least 1.
std::uint64_t part_of_limit(std::uint64_t limit, int percent);

}  // namespace trtdet::serve
