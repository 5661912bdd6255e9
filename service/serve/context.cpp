#include "context.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "threads.hpp"
#include "trtdet/cores.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::serve {

void Health::note(const Outcome& outcome, bool in_time) {
    if (!outcome.error) {
        failed_in_a_row_ = in_time ? 0 : failed_in_a_row_ + 1;
        return;
    }
    try {
        std::rethrow_exception(outcome.error);
    } catch (const EngineError&) {
        ++failed_in_a_row_;
    } catch (const DeadlineError&) {
        ++failed_in_a_row_;
    } catch (...) {  // says nothing about the engine
    }
}

MemoryBudget::Share::~Share() {
    if (bytes_ > 0) {
        const std::lock_guard lock(budget_.mutex_);
        budget_.taken_ -= bytes_;
        budget_.changed_.notify_all();
    }
}

void MemoryBudget::Share::take(std::uint64_t bytes, Clock::time_point deadline) {
    std::unique_lock lock(budget_.mutex_);
    const bool room = budget_.changed_.wait_until(
        lock, deadline, [&] { return budget_.taken_ == 0 || budget_.taken_ + bytes <= budget_.bytes_; });
    if (!room) {
        throw DeadlineError("the time for the answer was over before there was memory to decode the image into");
    }
    budget_.taken_ += bytes;
    bytes_ = bytes;
}

std::optional<std::string> Health::trouble() const {
    const int failed = failed_in_a_row_;
    if (unhealthy_after_ == 0 || failed < unhealthy_after_) {
        return std::nullopt;
    }
    return "the engine failed on the last " + std::to_string(failed) + " images, or was too late with them";
}

namespace {

std::vector<std::unique_ptr<Served>> served(std::vector<ModelSource> sources, int unhealthy_after) {
    std::vector<std::unique_ptr<Served>> models;
    for (auto& source : sources) {
        models.push_back(std::make_unique<Served>(std::move(source), unhealthy_after));
    }
    return models;
}

}  // namespace

Context::Context(ServiceOptions wanted, std::vector<ModelSource> sources, Log& where, Metrics& counts)
    : options(wanted),
      models(served(std::move(sources), options.unhealthy_after)),
      log(where),
      metrics(counts),
      decoding(options.max_decoded),
      workers(std::make_unique<Workers>(options.workers > 0 ? options.workers : usable_cores())) {}

Context::~Context() = default;

Served* Context::find(std::string_view name) const {
    for (const auto& model : models) {
        if (model->name == name) {
            return model.get();
        }
    }
    return nullptr;
}

std::optional<Response> Context::trouble() const {
    for (const auto& model : models) {
        if (auto found = trouble(*model)) {
            return found;
        }
    }
    return std::nullopt;
}

bool Context::hangs(const Served& model) const {
    return options.engine_timeout.count() > 0 && model.current()->longest_run() >= options.engine_timeout;
}

std::optional<Response> Context::trouble(const Served& model) const {
    auto trouble = model.health.trouble();
    if (hangs(model)) {
        trouble = "the engine has been running a batch for longer than --engine-timeout";
    }
    if (!trouble) {
        return std::nullopt;
    }
    return error_response(
        503, "engine-failed",
        (models.size() > 1 ? "of the model " + quote(model.name) + " " : "") + *trouble +
            "; the reason is in the service's log; the service must be started again");
}

Response unknown_model(const Context& context, std::string_view name) {
    std::string names;
    for (const auto& model : context.models) {
        names += (names.empty() ? "" : ", ") + quote(model->name);
    }
    return error_response(404, "unknown-model", "there is no model " + quote(name) + "; served are " + names);
}

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
