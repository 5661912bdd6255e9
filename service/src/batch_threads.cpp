#include "batch_threads.hpp"

#include <algorithm>

namespace trtdet {

BatchThreads::BatchThreads(std::size_t threads, std::size_t callers) {
    // Nothing has to be made room for later, when it could not be refused.
    rounds_.reserve(callers);
    try {
        for (std::size_t index = 0; index < threads; ++index) {
            threads_.emplace_back([this] {
                std::unique_lock lock(mutex_);
                while (true) {
                    changed_.wait(lock, [&] { return ending_ || !rounds_.empty(); });
                    if (rounds_.empty()) {
                        return;
                    }
                    step(lock, *rounds_.front());
                }
            });
        }
    } catch (...) {
        end();
        throw;
    }
}

BatchThreads::~BatchThreads() {
    end();
}

void BatchThreads::end() {
    {
        const std::lock_guard lock(mutex_);
        ending_ = true;
    }
    changed_.notify_all();
    for (std::thread& thread : threads_) {
        thread.join();
    }
}

void BatchThreads::each(std::size_t count, const std::function<void(std::size_t)>& work) {
    if (count < 2 || threads_.empty()) {
        for (std::size_t index = 0; index < count; ++index) {
            work(index);
        }
        return;
    }
    Round round{&work, count};
    std::unique_lock lock(mutex_);
    rounds_.push_back(&round);
    changed_.notify_all();
    while (round.next < round.count) {
        step(lock, round);
    }
    changed_.wait(lock, [&] { return round.done == round.count; });
}

// Does one of a round's pieces, without the lock. After the last the round may be gone.
void BatchThreads::step(std::unique_lock<std::mutex>& lock, Round& round) {
    const std::size_t index = round.next++;
    if (round.next == round.count) {
        rounds_.erase(std::find(rounds_.begin(), rounds_.end(), &round));
    }
    lock.unlock();
    (*round.work)(index);
    lock.lock();
    if (++round.done == round.count) {
        changed_.notify_all();
    }
}

}  // namespace trtdet
