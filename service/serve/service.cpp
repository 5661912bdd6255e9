#include "service.hpp"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "detect.hpp"
#include "open_inference.hpp"
#include "router.hpp"
#include "trtdet/version.hpp"
#include "workers.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

Response health(const Context& context) {
    return context.trouble().value_or(json_response({{"status", "ok"}}));
}

Response readiness(const Context& context) {
    if (context.leaving) {
        return error_response(503, "stopping", "the service is stopping");
    }
    Json runs_on = Json::object();
    for (const auto& model : context.models) {
        const auto detector = model->current();
        runs_on[model->name] = detector ? Json(detector->ran_on()) : Json(nullptr);
    }
    return context.trouble().value_or(json_response({{"status", "ready"}, {"runs_on", runs_on}}));
}

Json masks_of(const Manifest& manifest) {
    if (const auto& masks = manifest.masks) {
        return {{"size", masks->size}, {"threshold", Json::parse(shortest(masks->threshold))}};
    }
    if (const auto& masks = manifest.parts.masks) {
        return {{"prototypes", {masks->count, masks->height, masks->width}}, {"threshold", masks->threshold}};
    }
    return nullptr;
}

Json keypoints_of(const Manifest& manifest) {
    const auto& keypoints = manifest.parts.keypoints;
    return keypoints ? Json{{"names", keypoints->names}, {"skeleton", keypoints->skeleton}} : Json(nullptr);
}

Json model_facts(const Served& model) {
    const auto detector = model.current();
    if (!detector) {
        return {{"served_as", model.name}, {"runs_on", nullptr}};
    }
    const auto& manifest = detector->manifest();
    return {
        {"name", manifest.model_name},
        {"served_as", model.name},
        {"content_hash", manifest.content_hash},
        {"created", manifest.created},
        {"runs_on", detector->ran_on()},
        {"backend", {{"name", manifest.backend.name}, {"version", manifest.backend.version}}},
        {"input",
         {{"height", manifest.input.preprocess.height},
          {"width", manifest.input.preprocess.width},
          {"max_batch", manifest.input.max_batch}}},
        {"score_threshold", Json::parse(shortest(manifest.nms.score_threshold))},
        {"iou_threshold", Json::parse(shortest(manifest.nms.iou_threshold))},
        {"max_detections", manifest.nms.max_detections},
        {"masks", masks_of(manifest)},
        {"keypoints", keypoints_of(manifest)},
        {"rotated_boxes", manifest.parts.rotated_boxes.has_value()},
        {"classes", manifest.classes}};
}

Response models(const Context& context) {
    Json list = Json::array();
    for (const auto& model : context.models) {
        list.push_back(model_facts(*model));
    }
    return json_response({{"models", list}});
}

Response model(const Context& context, const std::string& name) {
    const auto* found = context.find(name);
    return found == nullptr ? unknown_model(context, name) : json_response(model_facts(*found));
}

Response metrics(const Context& context) {
    std::vector<ModelState> states;
    for (const auto& model : context.models) {
        if (const auto detector = model->current()) {
            states.push_back({model->name, detector->queued(), detector->running()});
        }
    }
    context.metrics.memory(context.bodies.taken(), context.decoding.taken());
    return {200, Metrics::content_type, context.metrics.text(states), {}, {}};
}

Response list(const std::vector<Endpoint>& endpoints) {
    Json list = Json::array();
    for (const auto& endpoint : endpoints) {
        list.push_back({{"path", endpoint.path}, {"methods", endpoint.allow}, {"what", endpoint.what}});
    }
    return json_response({{"service", "trtdet-serve"}, {"version", TRTDET_VERSION}, {"endpoints", list}});
}

std::vector<Endpoint> all_endpoints(const std::shared_ptr<Context>& context) {
    std::vector<Endpoint> all{page("/", "this list", nullptr)};
    for (auto& endpoint : detect_endpoints(context)) {
        all.push_back(std::move(endpoint));
    }
    all.push_back(page("/v1/model", "what is run", [context](const Words& /*words*/) {
        return json_response(model_facts(*context->models.front()));
    }));
    all.push_back(page("/v1/models", "all models", [context](const Words& /*words*/) { return models(*context); }));
    all.push_back(page("/v1/models/{model}", "the model of this name", [context](const Words& words) {
        return model(*context, words[0]);
    }));
    for (auto& endpoint : open_inference_endpoints(context)) {
        all.push_back(std::move(endpoint));
    }
    all.push_back(page(
        "/healthz", "200 while the process works", [context](const Words& /*words*/) { return health(*context); }));
    all.push_back(page("/readyz", "200 while it should be sent requests", [context](const Words& /*words*/) {
        return readiness(*context);
    }));
    all.push_back(page("/metrics", "counts and times for Prometheus", [context](const Words& /*words*/) {
        return metrics(*context);
    }));
    const auto listed = list(all);
    all.front() = page("/", "this list", [listed](const Words& /*words*/) { return listed; });
    return all;
}

}  // namespace

class Service::Impl {
public:
    Impl(ServiceOptions options, std::vector<ModelSource> models, Log& log, Metrics& metrics)
        : context(std::make_shared<Context>(options, std::move(models), log, metrics)),
          router(all_endpoints(context)) {}

    const std::shared_ptr<Context> context;
    const Router router;
};

Service::Service(ServiceOptions options, std::vector<ModelSource> models, Log& log, Metrics& metrics)
    : impl_(std::make_unique<Impl>(options, std::move(models), log, metrics)) {}

Service::~Service() {
    impl_->context->workers->finish();
}

const ServiceOptions& Service::options() const {
    return impl_->context->options;
}

std::optional<Response> Service::refuse(const Head& head) const {
    return impl_->router.refuse(head);
}

Clients& Service::clients() const {
    return impl_->context->clients;
}

std::shared_ptr<MemoryBudget::Share> Service::body_of(const Head& head) const {
    return std::make_shared<MemoryBudget::Share>(impl_->context->bodies, client_of(head));
}

void Service::post(const Head& head, std::function<void()> task) const {
    impl_->context->workers->post(client_of(head)->number, std::move(task));
}

void Service::handle(Request request, Done done) {
    impl_->router.handle(std::move(request), std::move(done));
}

void Service::answered(const Head& head, Response& response, Clock::duration took) const {
    use_error_form(head, response);
    if (!head.request_id.empty()) {
        response.headers.emplace_back("X-Request-Id", head.request_id);
    }
    const auto* endpoint = impl_->router.find(split_target(head.target).path);
    impl_->context->metrics.answered(endpoint == nullptr ? "other" : std::string_view(endpoint->path), response.status);
    if (endpoint != nullptr && endpoint->runs && response.status == 200) {
        impl_->context->metrics.detected(took);
    }
    if (!response.error.empty()) {
        impl_->context->metrics.error(response.error);
    }
    if (impl_->context->log.shows(Level::debug)) {
        impl_->context->log.write(
            Level::debug, "answered",
            {{"peer", head.peer},
             {"request_id", head.request_id},
             {"traceparent", head.traceparent},
             {"method", head.method},
             {"target", head.target},
             {"status", response.status},
             {"bytes", response.body.size()},
             {"ms", std::chrono::duration<double, std::milli>(took).count()}});
    }
}

void Service::leave() {
    impl_->context->leaving = true;
}

}  // namespace trtdet::serve
