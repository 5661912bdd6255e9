#include "context.hpp"

#include <algorithm>
#include <exception>
#include <string>
#include <utility>

#include "trtdet/cores.hpp"
#include "trtdet/errors.hpp"
#include "workers.hpp"

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
      bodies(
          "the bodies", "--max-bodies-mb", options.max_bodies,
          part_of_limit(options.max_bodies, options.max_client_percent)),
      decoding(
          "images, numbers and answers", "--max-decoded-mb", options.max_decoded,
          part_of_limit(options.max_decoded, options.max_client_percent)),
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
    const auto detector = model.current();
    return options.engine_timeout.count() > 0 && detector && detector->longest_run() >= options.engine_timeout;
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

namespace {

// Whether there are too many requests in work, and who has them. counted: of these, of the one that asks.
std::optional<Response> over(const Context& context, const Client& client, std::size_t counted) {
    const auto all = static_cast<std::size_t>(context.options.max_requests);
    const auto of_client = part_of_limit(all, context.options.max_client_percent);
    if (static_cast<std::size_t>(context.in_flight) + 1 - counted > all) {
        return busy_response(
            "overloaded",
            "all " + std::to_string(all) + " requests that are allowed at a time are taken (--max-requests)");
    }
    if (client.requests + 1 - counted > of_client) {
        return client_response(
            "you have the " + std::to_string(of_client) +
            " requests in work that one client may have (--max-requests, --max-client-percent); try again later");
    }
    return std::nullopt;
}

}  // namespace

Response unknown_model(const Context& context, std::string_view name) {
    std::string names;
    for (const auto& model : context.models) {
        names += (names.empty() ? "" : ", ") + quote(model->name);
    }
    return error_response(404, "unknown-model", "there is no model " + quote(name) + "; served are " + names);
}

Response unloaded_model(const Served& model) {
    return error_response(
        503, "unloaded",
        "the model " + quote(model.name) + " is unloaded; load it on the admin port: POST /v2/repository/models/" +
            model.name + "/load");
}

std::shared_ptr<Client> client_of(const Head& head) {
    static const auto nobody = std::make_shared<Client>(0);
    return head.client ? head.client : nobody;
}

Place::Place(std::shared_ptr<Context> context, std::shared_ptr<Client> client)
    : context_(std::move(context)), client_(std::move(client)) {
    context_->metrics.in_flight(+1);
    ++context_->in_flight;
    ++client_->requests;
}

Place::~Place() {
    context_->metrics.in_flight(-1);
    --context_->in_flight;
    --client_->requests;
}

std::variant<std::unique_ptr<Place>, Response> Place::take(const std::shared_ptr<Context>& context, const Head& head) {
    // Counted first: of two at the same time one may be refused, and no more are let in.
    std::unique_ptr<Place> place(new Place(context, client_of(head)));
    if (auto refusal = over(*context, *place->client_, 1)) {
        return std::move(*refusal);
    }
    return place;
}

std::optional<Response> Place::refusal(const Context& context, const Head& head) {
    return over(context, *client_of(head), 0);
}

}  // namespace trtdet::serve
