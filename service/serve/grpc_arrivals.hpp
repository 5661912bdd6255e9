// Messages over gRPC on their way: whose is read next, and whose gives way.
#pragma once

#include <grpcpp/support/status.h>

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "memory_budget.hpp"

namespace trtdet::serve {

// A call whose message is not there yet.
class Arrival {
public:
    virtual ~Arrival() = default;

    // Asks gRPC for the message.
    virtual void read() = 0;

    // Answers with this; once, what comes later is of no use.
    virtual void end(const grpc::Status& status) = 0;

    // What the message takes of the memory for bodies.
    virtual MemoryBudget::Share& held() const = 0;

    // The number of its client.
    virtual std::uint64_t client() const = 0;
};

// Calls whose message is not there yet. gRPC holds up to a window of each, and all of a message that is asked for: that
// is charged to the client first, and whoever has no room for it waits. Of those that wait, the client that holds least
// is first; where there is no room for it, the one that holds most, by half a message or more, loses the call whose
// message has been coming for longest. Any thread may call any member at any time.
class Arrivals {
public:
    // What gRPC holds of a call before its message is asked for.
    static constexpr std::uint64_t window = 65'536;

    // largest: bytes of a message. windows: bytes of what a client may have that are for windows alone, so that it can
    // begin calls while its messages arrive. reserve: bytes of what all may have that are for the windows of clients
    // with few calls. patience: until a message must be there.
    Arrivals(std::uint64_t largest, std::uint64_t windows, std::uint64_t reserve, std::chrono::milliseconds patience)
        : largest_(largest),
          windows_(windows),
          reserve_(reserve),
          most_of_client_(std::max<std::size_t>(1, windows / window)),
          patience_(patience),
          thread_([this] { watch(); }) {}
    ~Arrivals();

    Arrivals(const Arrivals&) = delete;
    Arrivals& operator=(const Arrivals&) = delete;

    // Throws MemoryLimitError: there is no room for the window. Returns whether the client may have one more.
    bool add(const std::shared_ptr<Arrival>& call);

    // Its message is there, or it is over. Returns whether it was waited for until now.
    bool remove(const Arrival& call);

    std::size_t most_of_client() const { return most_of_client_; }
    std::uint64_t largest() const { return largest_; }

private:
    struct Awaited {
        std::shared_ptr<Arrival> call;
        Clock::time_point until;
        bool asked = false;  // for its message
        Clock::time_point since = Clock::now();
    };

    // Calls of a client that wait for room, in the order in which they came.
    struct Line {
        std::uint64_t held;  // by its client
        std::deque<std::list<Awaited>::iterator> places;
    };

    struct Room {
        std::vector<std::shared_ptr<Arrival>> ready;  // whose messages have room now
        std::shared_ptr<Arrival> slowest;             // the call that is to be ended to make room, if any
    };

    bool charge_message(const Arrival& call) const;
    void watch();
    std::vector<std::shared_ptr<Arrival>> take_overdue();
    Room make_room();
    std::shared_ptr<Arrival> slowest_of_others(const Arrival& call);
    std::unordered_map<std::uint64_t, Line> lines();

    const std::uint64_t largest_;
    const std::uint64_t windows_;
    const std::uint64_t reserve_;
    const std::size_t most_of_client_;
    const std::chrono::milliseconds patience_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::size_t waiting_ = 0;
    std::list<Awaited> all_;  // in the order in which they came
    std::unordered_map<const Arrival*, std::list<Awaited>::iterator> places_;
    std::unordered_map<std::uint64_t, std::size_t> by_client_;
    Clock::time_point ended_one_{};  // to make room
    std::thread thread_;
};

}  // namespace trtdet::serve
