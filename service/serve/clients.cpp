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

std::shared_ptr<Client> Clients::of(const boost::asio::ip::address& address) {
    const auto network = network_of(address);
    const std::lock_guard lock(mutex_);
    auto& known = known_[network];
    auto client = known.lock();
    if (!client) {
        client = std::make_shared<Client>(++last_);
        known = client;
    }
    if (known_.size() > sweep_at_) {
        for (auto one = known_.begin(); one != known_.end();) {
            one = one->second.expired() ? known_.erase(one) : std::next(one);
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
