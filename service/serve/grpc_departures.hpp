// Answers over gRPC on their way: whoever does not take them does not keep them.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

#include "request.hpp"

namespace trtdet::serve {

// A call whose answer is being sent.
class Departure {
public:
    virtual ~Departure() = default;

    // Ends the call without its answer.
    virtual void cut() = 0;

    // The number of its client.
    virtual std::uint64_t client() const = 0;
};

// Calls whose answer is being sent, which takes as long as the client's windows are closed. An answer that was not
// taken in time ends, and of those that a client leaves for a while it keeps a few. Any thread may call any member at
// any time.
class Departures {
public:
    // Answers that a client may leave for longer than a moment.
    static constexpr std::size_t most_of_client = 100;
    static constexpr std::chrono::milliseconds moment{1000};

    // patience: until an answer must be taken.
    explicit Departures(std::chrono::milliseconds patience) : patience_(patience), thread_([this] { watch(); }) {}
    ~Departures();

    Departures(const Departures&) = delete;
    Departures& operator=(const Departures&) = delete;

    void add(const std::shared_ptr<Departure>& call);

    // It is over.
    void remove(const Departure& call);

private:
    struct Sent {
        std::shared_ptr<Departure> call;
        Clock::time_point since = Clock::now();
        bool is_cut = false;
    };

    void watch();
    std::vector<std::shared_ptr<Departure>> take_overdue();

    const std::chrono::milliseconds patience_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool ended_ = false;
    std::list<Sent> all_;  // in the order in which they were answered
    std::unordered_map<const Departure*, std::list<Sent>::iterator> places_;
    std::thread thread_;
};

}  // namespace trtdet::serve
