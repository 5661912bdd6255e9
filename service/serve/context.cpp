#include "context.hpp"

#include <algorithm>
#include <boost/asio/thread_pool.hpp>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "trtdet/errors.hpp"

namespace trtdet::serve {

void Health::note(const Outcome& outcome) {
    if (!outcome.error) {
        failed_in_a_row_ = 0;
        return;
    }
    try {
        std::rethrow_exception(outcome.error);
    } catch (const EngineError&) {
        ++failed_in_a_row_;
    } catch (...) {  // says nothing about the engine
    }
}

std::optional<Response> Health::trouble() const {
    const int failed = failed_in_a_row_;
    if (unhealthy_after_ == 0 || failed < unhealthy_after_) {
        return std::nullopt;
    }
    return error_response(
        503, "engine-failed",
        "the engine failed on the last " + std::to_string(failed) +
            " images; the reason is in the service's log; the service must be started again");
}

Context::Context(ServiceOptions wanted, std::function<std::shared_ptr<Detector>()> what, Log& where, Metrics& counts)
    : options(wanted),
      current(std::move(what)),
      log(where),
      metrics(counts),
      health(options.unhealthy_after),
      pool(std::make_unique<boost::asio::thread_pool>(
          options.workers > 0 ? static_cast<std::size_t>(options.workers)
                              : std::max<std::size_t>(1, std::thread::hardware_concurrency()))) {}

Context::~Context() = default;

std::unique_ptr<Place> Place::take(const std::shared_ptr<Context>& context) {
    std::unique_ptr<Place> place(new Place(context));
    context->metrics.in_flight(+1);
    if (++context->in_flight > context->options.max_requests) {
        return nullptr;
    }
    return place;
}

Place::~Place() {
    context_->metrics.in_flight(-1);
    --context_->in_flight;
}

Response Place::all_taken(const Context& context) {
    return busy_response(
        "overloaded",
        "all " + std::to_string(context.options.max_requests) + " requests that are allowed at a time are taken");
}

}  // namespace trtdet::serve
