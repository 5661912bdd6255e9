#include "clients.hpp"

#include <algorithm>

namespace trtdet::serve {
namespace {

std::string network_of(const boost::asio::ip::address& address) {
    if (!address.is_v6()) {
        return address.to_string();
    }
    const auto& v6 = address.to_v6();
    if (v6.is_v4_mapped()) {
        return boost::asio::ip::make_address_v4(boost::asio::ip::v4_mapped, v6).to_string();
    }
    auto bytes = v6.to_bytes();
    std::fill(bytes.begin() + 8, bytes.end(), static_cast<unsigned char>(0));
    return boost::asio::ip::address_v6(bytes).to_string();
}

}  // namespace

void Refusals::refill() {
    const auto now = std::chrono::steady_clock::now();
    left_ = std::min(most, left_ + most * std::chrono::duration<double>(now - at_).count());
    at_ = now;
}

bool Refusals::add() {
    const std::lock_guard lock(mutex_);
    refill();
    // A burst is forgiven after a while, however large it was.
    left_ = std::max(-most, left_ - 1);
    return left_ < 0;
}

void Refusals::add_flood() {
    const std::lock_guard lock(mutex_);
    refill();
    left_ = -most;
}

bool Refusals::may_connect() {
    const std::lock_guard lock(mutex_);
    refill();
    if (left_ > most / 2) {
        return true;
    }
    // A connection may begin all its calls before any of them is refused.
    if (left_ < calls) {
        return false;
    }
    left_ -= calls;
    return true;
}

bool Refusals::forgiven() {
    const std::lock_guard lock(mutex_);
    refill();
    return left_ == most;
}

std::shared_ptr<Client> Clients::of(const boost::asio::ip::address& address) {
    const auto network = network_of(address);
    const std::lock_guard lock(mutex_);
    auto& known = known_[network];
    auto client = known.client.lock();
    if (!client) {
        client = std::make_shared<Client>(++last_, known.refusals);
        known.client = client;
    }
    if (known_.size() > sweep_at_) {
        for (auto one = known_.begin(); one != known_.end();) {
            const auto& [left, refusals] = one->second;
            one = left.expired() && refusals->forgiven() ? known_.erase(one) : std::next(one);
        }
        sweep_at_ = std::max<std::size_t>(64, 2 * known_.size());
    }
    return client;
}

std::uint64_t part_of_limit(std::uint64_t limit, int percent) {
    const auto hundred = static_cast<std::uint64_t>(percent);
    return std::max<std::uint64_t>(1, limit / 100 * hundred + limit % 100 * hundred / 100);
}

}  // namespace trtdet::serve
