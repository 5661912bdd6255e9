// Threads that decode and pre-process for all clients, in turn.
#pragma once

#include <boost/intrusive/list.hpp>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <unordered_map>
#include <vector>

namespace trtdet::serve {

// Does what is posted: clients take turns, and the tasks of one of them begin in their order. A client who is alone may
// keep some threads busy; several share that number, and each may keep one busy, so that no client's tasks wait for
// those of another one to end. Tasks must not throw. Any thread may call any member but finish() at any time.
class Workers {
public:
    // of_client: tasks at a time of a client who is alone.
    //
    // Throws Error: there are not so many threads to be had.
    explicit Workers(int of_client);
    ~Workers();

    Workers(const Workers&) = delete;
    Workers& operator=(const Workers&) = delete;

    // After finish() whoever posts a task does it.
    //
    // Throws std::bad_alloc: nothing was posted.
    void post(std::uint64_t client, std::function<void()> task);

    // Returns when all that was posted is done. Called once.
    void finish();

private:
    // What a client has posted; in turn where one of its tasks may begin.
    struct Line : boost::intrusive::list_base_hook<boost::intrusive::link_mode<boost::intrusive::auto_unlink>> {
        std::uint64_t client = 0;
        std::deque<std::function<void()>> tasks;
        int running = 0;
    };

    void work();
    void queue_up(Line& line);
    void forget_if_done(const Line& line);
    int most_running() const;
    void stop();

    const int of_client_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool finishing_ = false;
    bool finished_ = false;
    std::unordered_map<std::uint64_t, Line> lines_;  // of clients that have tasks, waiting or running
    boost::intrusive::list<Line, boost::intrusive::constant_time_size<false>> turn_;
    std::vector<std::thread> threads_;
};

}  // namespace trtdet::serve
