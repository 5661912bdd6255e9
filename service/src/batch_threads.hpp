// Threads that share the images of a batch with the thread that runs it.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace trtdet {

class BatchThreads {
public:
    // callers: how many threads call each() at the same time.
    //
    // Throws std::system_error: there are not so many threads to be had.
    BatchThreads(std::size_t threads, std::size_t callers);
    ~BatchThreads();
    BatchThreads(const BatchThreads&) = delete;
    BatchThreads& operator=(const BatchThreads&) = delete;

    // Calls work(0) to work(count - 1), some of them in this thread, and returns when all are done. They must not
    // throw.
    void each(std::size_t count, const std::function<void(std::size_t)>& work);

private:
    struct Round {
        const std::function<void(std::size_t)>* work;
        std::size_t count;
        std::size_t next = 0;
        std::size_t done = 0;
    };

    void end();
    void step(std::unique_lock<std::mutex>& lock, Round& round);

    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Round*> rounds_;  // those of which something is not begun
    bool ending_ = false;
    std::vector<std::thread> threads_;
};

}  // namespace trtdet
