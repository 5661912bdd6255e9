// The addresses that requests come from, and what each of them has of what all share.
#pragma once

#include <atomic>
#include <boost/asio/ip/address.hpp>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>

namespace trtdet::serve {

// One address. Whoever does something for it holds it.
struct Client {
    explicit Client(std::uint64_t which) : number(which) {}

    const std::uint64_t number;  // from 1, never the same again
    std::atomic<std::size_t> connections{0};
    std::atomic<std::size_t> requests{0};  // that are worked on
    std::atomic<std::size_t> images{0};    // of these, between the start of decoding and what was found
};

// Any thread may call any member at any time.
class Clients {
public:
    // The same for the same address as long as anybody holds it. Of IPv6 the first 64 bits count: who has one address
    // has all of these.
    std::shared_ptr<Client> of(const boost::asio::ip::address& address);

private:
    std::mutex mutex_;
    std::unordered_map<std::string, std::weak_ptr<Client>> known_;
    std::size_t sweep_at_ = 64;  // how many are known when those that are gone are forgotten
    std::uint64_t last_ = 0;
};

// The part of a limit that one client may have: at least 1.
std::uint64_t part_of_limit(std::uint64_t limit, int percent);

}  // namespace trtdet::serve
