#include "grpc_arrivals.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace trtdet::serve {

Arrivals::~Arrivals() {
    {
        const std::lock_guard lock(mutex_);
        ended_ = true;
    }
    changed_.notify_all();
    thread_.join();
}

bool Arrivals::charge_message(const Arrival& call) const {
    auto& held = call.held();
    if (!held.try_set(largest_ + windows_, reserve_)) {
        return false;
    }
    held.set(largest_);
    return true;
}

bool Arrivals::add(const std::shared_ptr<Arrival>& call) {
    bool room = false;
    {
        const std::lock_guard lock(mutex_);
        auto& count = by_client_[call->client()];
        if (count >= most_of_client_) {
            return false;
        }
        constexpr std::size_t few = 16;
        const auto spare = count < few ? 0 : reserve_;
        if (!call->held().try_set(window, spare)) {
            if (count == 0) {
                by_client_.erase(call->client());
            }
            throw call->held().refusal(window, spare);
        }
        ++count;
        // Those that wait come first, but for a client that has nothing else.
        room = (waiting_ == 0 || count == 1) && charge_message(*call);
        all_.push_back({call, Clock::now() + patience_, room});
        places_[call.get()] = std::prev(all_.end());
        waiting_ += room ? 0 : 1;
    }
    if (room) {
        call->read();
    }
    return true;
}

bool Arrivals::remove(const Arrival& call) {
    std::shared_ptr<Arrival> last;  // which may be the last to hold it, and is not to end it under the lock
    const std::lock_guard lock(mutex_);
    const auto found = places_.find(&call);
    if (found == places_.end()) {
        return false;
    }
    const auto place = found->second;
    last = std::move(place->call);
    waiting_ -= place->asked ? 0 : 1;
    const auto count = by_client_.find(call.client());
    if (--count->second == 0) {
        by_client_.erase(count);
    }
    all_.erase(place);
    places_.erase(found);
    return true;
}

void Arrivals::watch() {
    // What gives memory back does not tell.
    constexpr std::chrono::milliseconds soon{3}, later{200};
    std::unique_lock lock(mutex_);
    while (!ended_) {
        changed_.wait_for(lock, waiting_ > 0 ? soon : later);
        const auto overdue = take_overdue();
        const auto [ready, slowest] = make_room();
        lock.unlock();
        for (const auto& call : overdue) {
            // Whoever has its message by now has an answer.
            if (remove(*call)) {
                call->end({grpc::StatusCode::DEADLINE_EXCEEDED, "the message did not arrive in time (--body-timeout)"});
            }
        }
        for (const auto& call : ready) {
            call->read();
        }
        if (slowest && remove(*slowest)) {
            slowest->end(
                {grpc::StatusCode::RESOURCE_EXHAUSTED,
                 "the message took long to arrive, and its memory is needed for others (--max-bodies-mb); try again "
                 "later"});
        }
        lock.lock();
    }
}

std::vector<std::shared_ptr<Arrival>> Arrivals::take_overdue() {
    std::vector<std::shared_ptr<Arrival>> overdue;
    const auto now = Clock::now();
    for (auto one = all_.begin(); one != all_.end() && one->until < now; ++one) {
        overdue.push_back(one->call);
    }
    return overdue;
}

std::unordered_map<std::uint64_t, Arrivals::Line> Arrivals::lines() {
    std::unordered_map<std::uint64_t, Line> lines;
    const auto now = Clock::now();
    for (auto one = all_.begin(); one != all_.end(); ++one) {
        if (!one->asked && one->until >= now) {
            lines[one->call->client()].places.push_back(one);
        }
    }
    for (auto& [client, line] : lines) {
        line.held = line.places.front()->call->held().bytes_of_client();
    }
    return lines;
}

Arrivals::Room Arrivals::make_room() {
    Room room;
    if (waiting_ == 0) {
        return room;
    }
    auto all = lines();
    while (!all.empty()) {
        const auto least = std::min_element(all.begin(), all.end(), [](const auto& one, const auto& other) {
            return one.second.held < other.second.held;
        });
        auto& line = least->second;
        const auto place = line.places.front();
        if (charge_message(*place->call)) {
            place->asked = true;
            place->since = Clock::now();
            --waiting_;
            room.ready.push_back(place->call);
            line.held += largest_ - window;
            line.places.pop_front();
        } else if (place->call->held().refusal(largest_ + windows_, reserve_).of() == MemoryLimitError::Of::all) {
            room.slowest = slowest_of_others(*place->call);
            break;
        } else {
            line.places.clear();
        }
        if (line.places.empty()) {
            all.erase(least);
        }
    }
    return room;
}

std::shared_ptr<Arrival> Arrivals::slowest_of_others(const Arrival& call) {
    // A message has so long undisturbed, and the memory of one that ended so long to come back.
    constexpr std::chrono::milliseconds undisturbed{50}, coming{10};
    const auto now = Clock::now();
    const auto most = call.held().budget().most_taken();
    // Clients that hold about as much would end each other's calls in turn, however fast these come.
    const bool less = call.held().bytes_of_client() + largest_ / 2 <= most.bytes;
    if (most.client == call.client() || !less || now < ended_one_ + coming) {
        return nullptr;
    }
    const Awaited* slowest = nullptr;
    for (const auto& one : all_) {
        if (one.asked && one.call->client() == most.client && (slowest == nullptr || one.since < slowest->since)) {
            slowest = &one;
        }
    }
    if (slowest == nullptr || now < slowest->since + undisturbed) {
        return nullptr;
    }
    ended_one_ = now;
    return slowest->call;
}

}  // namespace trtdet::serve
