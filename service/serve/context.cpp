#include "context.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <thread>
#include <utility>

#include "threads.hpp"
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

std::optional<std::string> Health::trouble() const {
    const int failed = failed_in_a_row_;
    if (unhealthy_after_ == 0 || failed < unhealthy_after_) {
        return std::nullopt;
    }
    return "the engine failed on the last " + std::to_string(failed) + " images";
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
      pool(std::make_unique<Pool>(
          options.workers > 0 ? options.workers : std::max(1, static_cast<int>(std::thread::hardware_concurrency())))) {
}

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

std::optional<Response> Context::trouble(const Served& model) const {
    const auto trouble = model.health.trouble();
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
