#include "grpc_departures.hpp"

#include <iterator>
#include <utility>

namespace trtdet::serve {

Departures::~Departures() {
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

void Departures::add(const std::shared_ptr<Departure>& call) {
    const std::lock_guard lock(mutex_);
    all_.push_back({call});
    places_[call.get()] = std::prev(all_.end());
}

void Departures::remove(const Departure& call) {
    std::shared_ptr<Departure> last;  // which may be the last to hold it, and is not to end it under the lock
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(&call);
    if (found == places_.end()) {
        return;
    }
    last = std::move(found->second->call);
    all_.erase(found->second);
    places_.erase(found);
}

void Departures::watch() {
    constexpr std::chrono::milliseconds soon{200};
    std::unique_lock lock(mutex_);
    while (!ended_) {
        changed_.wait_for(lock, soon);
        const auto overdue = take_overdue();
        lock.unlock();
        for (const auto& call : overdue) {
            call->cut();
        }
        lock.lock();
    }
}

std::vector<std::shared_ptr<Departure>> Departures::take_overdue() {
    std::vector<std::shared_ptr<Departure>> overdue;
    std::unordered_map<std::uint64_t, std::size_t> left;
    const auto now = Clock::now();
    // The newest first, as those are kept.
    for (auto one = all_.rbegin(); one != all_.rend(); ++one) {
        if (one->is_cut || now < one->since + moment) {
            continue;
        }
        if (++left[one->call->client()] > most_of_client || now >= one->since + patience_) {
            one->is_cut = true;
            overdue.push_back(one->call);
        }
    }
    return overdue;
}

}  // namespace trtdet::serve
