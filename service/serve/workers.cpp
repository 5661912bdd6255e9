#include "workers.hpp"

#include <algorithm>
#include <new>
#include <utility>

#include "threads.hpp"

namespace trtdet::serve {

namespace {

// So many clients beside the first find a thread that waits for them.
constexpr int most_others = 8;

}  // namespace

Workers::Workers(int of_client) : of_client_(of_client) {
    start_threads(threads_, static_cast<std::size_t>(of_client + most_others), [this] { work(); }, [this] { stop(); });
}

Workers::~Workers() {
    stop();
}

void Workers::stop() {
    {
        const std::lock_guard lock(mutex_);
        finishing_ = true;
    }
    changed_.notify_all();
    for (auto& thread : threads_) {
        thread.join();
    }
    threads_.clear();
}

void Workers::finish() {
    stop();
    const std::lock_guard lock(mutex_);
    finished_ = true;
}

void Workers::post(std::uint64_t client, std::function<void()> task) {
    {
        const std::lock_guard lock(mutex_);
        if (!finished_) {
            Line& line = lines_[client];
            line.client = client;
            try {
                line.tasks.push_back(std::move(task));
            } catch (const std::bad_alloc&) {
                forget_if_done(line);
                throw;
            }
            queue_up(line);
            changed_.notify_one();
            return;
        }
    }
    task();
}

int Workers::most_running() const {
    const auto clients = static_cast<int>(lines_.size());
    return std::max(1, (of_client_ + clients - 1) / clients);
}

// Needs no memory.
void Workers::queue_up(Line& line) {
    if (!line.is_linked() && !line.tasks.empty() && line.running < most_running()) {
        turn_.push_back(line);
    }
}

void Workers::forget_if_done(const Line& line) {
    if (line.running == 0 && line.tasks.empty()) {
        lines_.erase(line.client);
    }
}

void Workers::work() {
    std::unique_lock lock(mutex_);
    while (true) {
        // A task may post another one.
        changed_.wait(lock, [this] { return !turn_.empty() || (finishing_ && lines_.empty()); });
        if (turn_.empty()) {
            return;
        }
        Line& line = turn_.front();
        turn_.pop_front();
        auto task = std::move(line.tasks.front());
        line.tasks.pop_front();
        ++line.running;
        queue_up(line);
        if (!turn_.empty()) {
            changed_.notify_one();
        }
        lock.unlock();
        task();
        task = nullptr;
        lock.lock();
        --line.running;
        queue_up(line);
        forget_if_done(line);
        if (finishing_ && lines_.empty()) {
            changed_.notify_all();
        }
    }
}

}  // namespace trtdet::serve
