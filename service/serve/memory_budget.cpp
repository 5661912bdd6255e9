#include "memory_budget.hpp"

#include <algorithm>
#include <utility>

#include "trtdet/errors.hpp"

namespace trtdet::serve {
namespace {

std::string mebibytes(std::uint64_t bytes) {
    return std::to_string((bytes + (1U << 20U) - 1) >> 20U) + " MiB";
}

}  // namespace

Response MemoryLimitError::response() const {
    switch (of_) {
        case Of::request:
            return error_response(413, "request-too-large", what());
        case Of::client:
            return client_response(what());
        case Of::all:
            break;
    }
    return busy_response("overloaded", what());
}

MemoryBudget::Room MemoryBudget::room(const Client& client, std::uint64_t more, std::uint64_t spare) const {
    if (taken_ + more + spare > bytes_) {
        return Room::of_all;
    }
    const auto mine = by_client_.find(&client);
    return (mine == by_client_.end() ? 0 : mine->second) + more > of_client_ ? Room::of_client : Room::enough;
}

void MemoryBudget::change(const Client& client, std::uint64_t from, std::uint64_t to) {
    if (from == to) {
        return;
    }
    const auto mine = by_client_.try_emplace(&client, 0).first;
    mine->second = mine->second - from + to;
    taken_ = taken_ - from + to;
    if (mine->second == 0) {
        by_client_.erase(mine);
    }
    if (to < from) {
        changed_.notify_all();
    }
}

MemoryLimitError MemoryBudget::too_much(std::uint64_t bytes) const {
    return {
        MemoryLimitError::Of::request, what_ + " would take " + mebibytes(bytes) + ", and " + mebibytes(of_client_) +
                                           " are allowed to one client (" + option_ +
                                           ", --max-client-percent); send less at a time"};
}

std::uint64_t MemoryBudget::taken() const {
    const std::lock_guard lock(mutex_);
    return taken_;
}

MemoryBudget::Taken MemoryBudget::most_taken() const {
    const std::lock_guard lock(mutex_);
    const auto most = std::max_element(by_client_.begin(), by_client_.end(), [](const auto& one, const auto& other) {
        return one.second < other.second;
    });
    return most == by_client_.end() ? Taken{} : Taken{most->first->number, most->second};
}

MemoryBudget::Share::~Share() {
    if (bytes_ > 0) {
        const std::lock_guard lock(budget_.mutex_);
        budget_.change(*client_, bytes_, 0);
    }
}

void MemoryBudget::Share::wait_for(std::uint64_t bytes, Clock::time_point deadline) {
    if (bytes > budget_.of_client_) {
        throw budget_.too_much(bytes);
    }
    std::unique_lock lock(budget_.mutex_);
    const auto enough = [&] { return bytes <= bytes_ || budget_.room(*client_, bytes - bytes_) == Room::enough; };
    if (!budget_.changed_.wait_until(lock, deadline, enough)) {
        throw DeadlineError(
            "the time for the answer was over before there was memory for it: " + budget_.what_ + ", " +
            budget_.option_);
    }
    budget_.change(*client_, bytes_, bytes);
    bytes_ = bytes;
}

MemoryBudget::Room MemoryBudget::Share::room(std::uint64_t bytes, std::uint64_t spare) const {
    return bytes > bytes_ ? budget_.room(*client_, bytes - bytes_, spare) : Room::enough;
}

std::uint64_t MemoryBudget::Share::bytes_of_client() const {
    const std::lock_guard lock(budget_.mutex_);
    const auto mine = budget_.by_client_.find(client_.get());
    return mine == budget_.by_client_.end() ? 0 : mine->second;
}

bool MemoryBudget::Share::try_set(std::uint64_t bytes, std::uint64_t spare) noexcept try {
    const std::lock_guard lock(budget_.mutex_);
    if (const auto room = this->room(bytes, spare); room != Room::enough) {
        refused_ = room;
        return false;
    }
    budget_.change(*client_, bytes_, bytes);
    bytes_ = bytes;
    return true;
} catch (const std::bad_alloc&) {  // of the first share of a client
    return false;
}

void MemoryBudget::Share::set(std::uint64_t bytes) {
    if (!try_set(bytes)) {
        throw refusal(bytes);
    }
}

MemoryLimitError MemoryBudget::Share::refusal(std::uint64_t bytes, std::uint64_t spare) const {
    if (bytes > budget_.of_client_) {
        return budget_.too_much(bytes);
    }
    const std::lock_guard lock(budget_.mutex_);
    // Some of it may have been given back since it was refused.
    const auto room = this->room(bytes, spare);
    if ((room == Room::enough ? refused_ : room) == Room::of_client) {
        return {
            MemoryLimitError::Of::client, budget_.what_ + " of your requests take all of the " +
                                              mebibytes(budget_.of_client_) + " that are allowed to one client (" +
                                              budget_.option_ + ", --max-client-percent); try again later"};
    }
    return {
        MemoryLimitError::Of::all, budget_.what_ + " of all requests take all of the " + mebibytes(budget_.bytes_) +
                                       " that are allowed (" + budget_.option_ + "); try again later"};
}

}  // namespace trtdet::serve
