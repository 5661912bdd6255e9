// Threads for the work of an io_context. Not asio's own pool: where only some of its threads can be started, it waits
// for those for ever.
#pragma once

#include <boost/asio/executor_work_guard.hpp>
#include <boost/asio/io_context.hpp>
#include <cstddef>
#include <functional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "trtdet/errors.hpp"

namespace trtdet::serve {

// Starts so many threads that do this work.
//
// stop: ends those that have been started, where there are not so many.
//
// Throws Error: there are not so many threads to be had. None is left then.
template <typename Stop>
void start_threads(
    std::vector<std::thread>& threads, std::size_t count, const std::function<void()>& work, const Stop& stop) {
    try {
        threads.reserve(count);
        while (threads.size() < count) {
            threads.emplace_back(work);
        }
    } catch (const std::system_error& error) {
        const auto started = threads.size();
        stop();
        throw Error(
            "only " + std::to_string(started) + " of " + std::to_string(count) + " threads could be started: " +
            error.code().message() + "; allow more processes and memory (ulimit -u, -v), or ask for fewer threads");
    } catch (...) {
        stop();
        throw;
    }
}

class Threads {
public:
    // work: what each thread does; it calls context.run().
    //
    // Throws Error: there are not so many threads to be had. None is left then.
    Threads(boost::asio::io_context& context, int count, const std::function<void()>& work)
        : context_(context), guard_(context.get_executor()) {
        start_threads(threads_, static_cast<std::size_t>(count), work, [this] { stop(); });
    }

    // What has not begun by then is dropped together with the context.
    ~Threads() { stop(); }

    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

private:
    void stop() {
        guard_.reset();
        context_.stop();
        join();
    }

    void join() {
        for (auto& thread : threads_) {
            thread.join();
        }
        threads_.clear();
    }

    boost::asio::io_context& context_;
    boost::asio::executor_work_guard<boost::asio::io_context::executor_type> guard_;
    std::vector<std::thread> threads_;
};

}  // namespace trtdet::serve
