// What the handlers of all endpoints work with.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>

#include "log.hpp"
#include "metrics.hpp"
#include "request.hpp"
#include "trtdet/detector.hpp"
#include "trtdet/image.hpp"

namespace boost::asio {
class thread_pool;
}

namespace trtdet::serve {

struct ServiceOptions {
    int workers = 0;                      // threads that decode and pre-process; 0 for as many as the machine has cores
    std::uint64_t max_body = 32U << 20U;  // bytes
    ImageLimits limits;
    std::size_t max_images = 32;  // of a request
    int max_requests = 256;       // that are worked on at a time
    std::chrono::milliseconds request_timeout{10'000};
    int unhealthy_after = 20;  // runs that failed one after the other; 0 for never
};

// What the runs of an engine say of its health.
class Health {
public:
    // unhealthy_after: runs that failed one after the other; 0 for never.
    explicit Health(int unhealthy_after) : unhealthy_after_(unhealthy_after) {}

    void note(const Outcome& outcome);

    // Why the process should be started again, if it should.
    std::optional<Response> trouble() const;

private:
    const int unhealthy_after_;
    std::atomic<int> failed_in_a_row_{0};
};

// Any thread may use it; who works for a request keeps it alive.
struct Context {
    // current: as Service has it. Log and metrics must live longer than this.
    Context(ServiceOptions wanted, std::function<std::shared_ptr<Detector>()> what, Log& where, Metrics& counts);
    ~Context();

    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    const ServiceOptions options;
    const std::function<std::shared_ptr<Detector>()> current;
    Log& log;
    Metrics& metrics;
    Health health;
    std::atomic<int> in_flight{0};  // requests that hold a Place
    std::atomic<bool> leaving{false};
    const std::unique_ptr<boost::asio::thread_pool> pool;  // decodes and pre-processes
};

// One of the requests that may be worked on at a time.
class Place {
public:
    // Nothing where all are taken.
    static std::unique_ptr<Place> take(const std::shared_ptr<Context>& context);

    ~Place();

    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    // The answer where all are taken.
    static Response all_taken(const Context& context);

private:
    explicit Place(std::shared_ptr<Context> context) : context_(std::move(context)) {}

    const std::shared_ptr<Context> context_;
};

}  // namespace trtdet::serve
