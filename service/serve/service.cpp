#include "service.hpp"

#include <boost/asio/thread_pool.hpp>
#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "detect.hpp"
#include "router.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view detect_path = "/v1/detect";

Response health(const Context& context) {
    return context.health.trouble().value_or(json_response({{"status", "ok"}}));
}

Response readiness(const Context& context) {
    if (context.leaving) {
        return error_response(503, "stopping", "the service is stopping");
    }
    return context.health.trouble().value_or(json_response({{"status", "ready"}}));
}

Response model(const Context& context) {
    const auto detector = context.current();
    const auto& manifest = detector->manifest();
    return json_response(
        {{"name", manifest.model_name},
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
         {"classes", manifest.classes}});
}

Response list(const std::vector<Endpoint>& endpoints) {
    Json list = Json::array();
    for (const auto& endpoint : endpoints) {
        list.push_back({{"path", endpoint.path}, {"methods", endpoint.allow}, {"what", endpoint.what}});
    }
    return json_response({{"service", "trtdet-serve"}, {"version", TRTDET_VERSION}, {"endpoints", list}});
}

}  // namespace

class Service::Impl {
public:
    Impl(ServiceOptions options, std::function<std::shared_ptr<Detector>()> current, Log& log, Metrics& metrics)
        : context(std::make_shared<Context>(options, std::move(current), log, metrics)),
          router(
              {page("/", "this list", [this] { return list(router.endpoints()); }), detect_endpoint(context),
               page("/v1/model", "what is run", [this] { return model(*context); }),
               page("/healthz", "200 while the process works", [this] { return health(*context); }),
               page("/readyz", "200 while it should be sent requests", [this] { return readiness(*context); }),
               page("/metrics", "counts and times for Prometheus", [this]() -> Response {
                   return {200, Metrics::content_type, context->metrics.text(context->current()->queued()), {}, {}};
               })}) {}

    const std::shared_ptr<Context> context;
    const Router router;
};

Service::Service(ServiceOptions options, std::function<std::shared_ptr<Detector>()> current, Log& log, Metrics& metrics)
    : impl_(std::make_unique<Impl>(options, std::move(current), log, metrics)) {}

Service::~Service() {
    impl_->context->pool->join();
}

const ServiceOptions& Service::options() const {
    return impl_->context->options;
}

std::optional<Response> Service::refuse(const Head& head) const {
    return impl_->router.refuse(head);
}

void Service::handle(Request request, Done done) {
    impl_->router.handle(std::move(request), std::move(done));
}

void Service::answered(const Head& head, const Response& response, Clock::duration took) const {
    const auto path = split_target(head.target).path;
    const auto* endpoint = impl_->router.find(path);
    impl_->context->metrics.answered(endpoint == nullptr ? "other" : std::string_view(endpoint->path), response.status);
    if (path == detect_path && response.status == 200) {
        impl_->context->metrics.detected(took);
    }
    if (!response.error.empty()) {
        impl_->context->metrics.error(response.error);
    }
    if (impl_->context->log.shows(Level::debug)) {
        impl_->context->log.write(
            Level::debug, "answered",
            {{"method", head.method},
             {"target", head.target},
             {"status", std::to_string(response.status)},
             {"bytes", std::to_string(response.body.size())},
             {"ms", std::to_string(std::chrono::duration<double, std::milli>(took).count())}});
    }
}

void Service::leave() {
    impl_->context->leaving = true;
}

}  // namespace trtdet::serve
