#include "service.hpp"

#include <algorithm>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <charconv>
#include <cmath>
#include <exception>
#include <nlohmann/json.hpp>
#include <thread>

#include "multipart.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr auto npos = std::string_view::npos;
constexpr std::string_view detect_path = "/v1/detect";

std::string dumped(const Json& json) {
    return json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n";
}

Response json_response(const Json& json) {
    return {200, "application/json", dumped(json), {}, {}};
}

double milliseconds(Clock::duration duration) {
    return std::chrono::duration<double, std::milli>(duration).count();
}

// 'a', 'b' or 'c', for messages.
std::string listed(const std::vector<std::string_view>& words) {
    std::string text;
    for (std::size_t i = 0; i < words.size(); ++i) {
        text += (i == 0 ? "" : i + 1 == words.size() ? " or " : ", ") + std::string(words[i]);
    }
    return text;
}

struct Endpoint {
    std::string_view path;
    std::string_view allow;  // the methods, as the header Allow lists them
    std::string_view what;
};

constexpr Endpoint endpoints[] = {
    {"/", "GET, HEAD", "this list"},
    {detect_path, "POST", "detects on a JPEG or PNG image, or on several as multipart/form-data"},
    {"/v1/model", "GET, HEAD", "what is run"},
    {"/healthz", "GET, HEAD", "200 while the process works"},
    {"/readyz", "GET, HEAD", "200 while it should be sent requests"},
    {"/metrics", "GET, HEAD", "counts and times for Prometheus"},
};

struct Target {
    std::string_view path;
    std::string_view query;
};

// Also takes the absolute form, http://host/path, which a server must.
Target split_target(std::string_view target) {
    const auto scheme = target.find("://");
    if (scheme != npos && target.front() != '/') {
        const auto slash = target.find('/', scheme + 3);
        target = slash == npos ? std::string_view("/") : target.substr(slash);
    }
    const auto question = target.find('?');
    return {target.substr(0, question), question == npos ? std::string_view() : target.substr(question + 1)};
}

const Endpoint* find_endpoint(std::string_view path) {
    const auto* found = std::find_if(
        std::begin(endpoints), std::end(endpoints), [&](const Endpoint& endpoint) { return endpoint.path == path; });
    return found == std::end(endpoints) ? nullptr : found;
}

bool allows(const Endpoint& endpoint, std::string_view method) {
    return endpoint.allow == method || (endpoint.allow == "GET, HEAD" && (method == "GET" || method == "HEAD"));
}

bool is_image_type(std::string_view type) {
    return type == "image/jpeg" || type == "image/png" || type == "application/octet-stream";
}

int hexadecimal(char digit) {
    if (digit >= '0' && digit <= '9') {
        return digit - '0';
    }
    if (digit >= 'a' && digit <= 'f') {
        return digit - 'a' + 10;
    }
    return digit >= 'A' && digit <= 'F' ? digit - 'A' + 10 : -1;
}

std::string percent_decoded(std::string_view text) {
    std::string result;
    for (std::size_t i = 0; i < text.size(); ++i) {
        if (text[i] != '%') {
            result.push_back(text[i] == '+' ? ' ' : text[i]);
            continue;
        }
        const int high = i + 2 < text.size() ? hexadecimal(text[i + 1]) : -1;
        const int low = i + 2 < text.size() ? hexadecimal(text[i + 2]) : -1;
        if (high < 0 || low < 0) {
            throw BadQuery("the query has a '%' without two hexadecimal digits; write %25 for a percent sign");
        }
        result.push_back(static_cast<char>(high * 16 + low));
        i += 2;
    }
    return result;
}

template <typename Number>
std::optional<Number> parsed(const std::string& text) {
    Number number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

std::string shortest(float number) {
    char text[32];
    const auto end = std::to_chars(std::begin(text), std::end(text), number).ptr;
    return {std::begin(text), end};
}

// What a request wants to see of the detections.
struct Wanted {
    float score_threshold = 0;
    int max_detections = 0;
};

// Throws BadQuery.
Wanted read_wanted(std::string_view query, const Manifest& manifest) {
    Wanted wanted{manifest.nms.score_threshold, manifest.nms.max_detections};
    for (const auto& [key, value] : parse_query(query)) {
        if (key == "score_threshold") {
            const auto number = parsed<float>(value);
            if (!number || !(*number >= manifest.nms.score_threshold && *number <= 1)) {
                throw BadQuery(
                    "score_threshold is " + quote(value) + ", allowed is " + shortest(manifest.nms.score_threshold) +
                    " (with which the bundle was built) to 1");
            }
            wanted.score_threshold = *number;
        } else if (key == "max_detections") {
            const auto number = parsed<int>(value);
            if (!number || *number < 1 || *number > manifest.nms.max_detections) {
                throw BadQuery(
                    "max_detections is " + quote(value) + ", allowed is 1 to " +
                    std::to_string(manifest.nms.max_detections) + " (with which the bundle was built)");
            }
            wanted.max_detections = *number;
        } else {
            throw BadQuery("the query has the key " + quote(key) + "; allowed are score_threshold and max_detections");
        }
    }
    return wanted;
}

// The answer where as many requests are worked on as may be.
Response all_taken(int most) {
    return busy_response(
        "overloaded", "all " + std::to_string(most) + " requests that are allowed at a time are taken");
}

// One image of a request, from its bytes to its detections.
struct Picture {
    std::string name;  // as the client called it; empty where it did not
    std::string_view bytes;
    int width = 0;
    int height = 0;
    Clock::duration decoded{};
    Outcome outcome;
};

// Appends what the answer says of an image. Floats are written with as many digits as bring back the same float32, and
// by hand: an answer can have thousands of them.
void append(std::string& text, const Picture& picture, const Wanted& wanted, const std::vector<std::string>& classes) {
    const auto number = [&text](float value) { text += std::isfinite(value) ? shortest(value) : "null"; };
    text += "{";
    if (!picture.name.empty()) {
        text += "\"name\":" + Json(picture.name).dump(-1, ' ', false, Json::error_handler_t::replace) + ",";
    }
    text += "\"width\":" + std::to_string(picture.width) + ",\"height\":" + std::to_string(picture.height) +
            ",\"detections\":[";
    int count = 0;
    for (const auto& detection : picture.outcome.found.detections) {
        // The best come first.
        if (count == wanted.max_detections || !(detection.score > wanted.score_threshold)) {
            break;
        }
        text += count++ == 0 ? "{\"box\":[" : ",{\"box\":[";
        number(detection.box.x1);
        text += ",";
        number(detection.box.y1);
        text += ",";
        number(detection.box.x2);
        text += ",";
        number(detection.box.y2);
        text += "],\"score\":";
        number(detection.score);
        text += ",\"class\":" + std::to_string(detection.class_index) + ",\"name\":";
        const auto index = static_cast<std::size_t>(detection.class_index);
        text +=
            index < classes.size() ? Json(classes[index]).dump(-1, ' ', false, Json::error_handler_t::replace) : "null";
        text += "}";
    }
    const Json times = {
        {"decode", milliseconds(picture.decoded)},
        {"queue", milliseconds(picture.outcome.found.queued)},
        {"run", milliseconds(picture.outcome.found.ran)}};
    text += "],\"batch\":" + std::to_string(picture.outcome.found.batch) + ",\"ms\":" + times.dump() + "}";
}

}  // namespace

Response error_response(int status, std::string_view type, std::string_view message) {
    const Json json = {{"error", {{"type", type}, {"message", message}}}};
    return {status, "application/json", dumped(json), {}, std::string(type)};
}

Response busy_response(std::string_view type, std::string_view message) {
    auto response = error_response(503, type, message);
    response.headers.emplace_back("Retry-After", "1");
    return response;
}

std::vector<std::pair<std::string, std::string>> parse_query(std::string_view query) {
    std::vector<std::pair<std::string, std::string>> words;
    while (!query.empty()) {
        const auto end = query.find('&');
        const auto word = query.substr(0, end);
        query.remove_prefix(end == npos ? query.size() : end + 1);
        if (word.empty()) {
            continue;
        }
        const auto equals = std::min(word.find('='), word.size());
        auto key = percent_decoded(word.substr(0, equals));
        for (const auto& other : words) {
            if (other.first == key) {
                throw BadQuery("the query has the key " + quote(key) + " twice");
            }
        }
        words.emplace_back(std::move(key), percent_decoded(equals < word.size() ? word.substr(equals + 1) : ""));
    }
    return words;
}

class Service::Impl : public std::enable_shared_from_this<Service::Impl> {
public:
    Impl(ServiceOptions wanted, std::function<std::shared_ptr<Detector>()> what, Log& where, Metrics& counts)
        : options(wanted),
          current(std::move(what)),
          log(where),
          metrics(counts),
          pool(
              options.workers > 0 ? static_cast<std::size_t>(options.workers)
                                  : std::max<std::size_t>(1, std::thread::hardware_concurrency())) {}

    std::optional<Response> refuse(const Head& head) const;
    std::optional<Response> refuse_detect(const Head& head, std::string_view query) const;
    Response get(std::string_view path) const;
    Response health() const;
    Response model() const;

    class Detection;

    const ServiceOptions options;
    const std::function<std::shared_ptr<Detector>()> current;
    Log& log;
    Metrics& metrics;
    std::atomic<int> in_flight{0};
    std::atomic<int> failed_in_a_row{0};
    std::atomic<bool> leaving{false};
    boost::asio::thread_pool pool;
};

// A request to detect, from its body to its answer. Everything that works on it keeps it alive.
class Service::Impl::Detection : public std::enable_shared_from_this<Service::Impl::Detection> {
public:
    Detection(std::shared_ptr<Impl> service, Request request, std::function<void(Answer)> done)
        : service_(std::move(service)), request_(std::move(request)), done_(std::move(done)) {
        service_->metrics.in_flight(+1);
    }

    ~Detection() { leave(); }

    Detection(const Detection&) = delete;
    Detection& operator=(const Detection&) = delete;

    void start() {
        detector_ = service_->current();
        try {
            wanted_ = read_wanted(split_target(request_.head.target).query, detector_->manifest());
            find_pictures();
        } catch (const BadQuery& error) {
            return refuse(error_response(400, "bad-query", error.what()));
        } catch (const TooManyPartsError& error) {
            return refuse(error_response(413, "too-many-images", error.what()));
        } catch (const MultipartError& error) {
            return refuse(error_response(400, "bad-multipart", error.what()));
        }
        if (refused_) {
            return;
        }
        deadline_ = request_.arrived + service_->options.request_timeout;
        // Each is decoded and handed over by one thread, and detected by another.
        waiting_ = 2 * pictures_.size();
        first_failed_ = pictures_.size();
        for (std::size_t i = 0; i < pictures_.size(); ++i) {
            boost::asio::post(service_->pool, [self = shared_from_this(), i] { self->decode(i); });
        }
    }

private:
    // Makes room for another request, before the client that waits for this one can send it.
    void leave() {
        if (!left_.exchange(true)) {
            service_->metrics.in_flight(-1);
            --service_->in_flight;
        }
    }

    void refuse(Response response) {
        refused_ = true;
        leave();
        done_([response = std::move(response)] { return response; });
    }

    void find_pictures() {
        const auto& head = request_.head;
        if (request_.body.empty()) {
            return refuse(error_response(400, "empty-body", "the body is empty; send a JPEG or PNG image"));
        }
        if (media_type(head.content_type) != "multipart/form-data") {
            pictures_.emplace_back().bytes = request_.body;
            return;
        }
        MultipartLimits limits;
        limits.max_parts = service_->options.max_images;
        for (auto& part : parse_multipart(request_.body, multipart_boundary(head.content_type), limits)) {
            auto& picture = pictures_.emplace_back();
            picture.name = part.filename.empty() ? std::move(part.name) : std::move(part.filename);
            picture.bytes = part.body;
            if (!part.content_type.empty() && !is_image_type(part.content_type)) {
                return refuse(error_response(
                    415, "unsupported-media-type",
                    which(pictures_.size() - 1) + "it has the Content-Type " + quote(part.content_type) +
                        "; expected image/jpeg, image/png or application/octet-stream"));
            }
        }
    }

    // Where a request has several images, which one a message is about.
    std::string which(std::size_t index) const {
        if (media_type(request_.head.content_type) != "multipart/form-data") {
            return {};
        }
        const auto& name = pictures_[index].name;
        return "image " + std::to_string(index) + (name.empty() ? "" : " (" + quote(name) + ")") + ": ";
    }

    void decode(std::size_t index) noexcept {
        auto& picture = pictures_[index];
        try {
            if (index > first_failed_) {
                throw StoppedError("not tried: an image before this one failed");
            }
            if (Clock::now() >= deadline_ || (request_.abandoned && *request_.abandoned)) {
                throw DeadlineError("the time for the answer was over before the image was decoded");
            }
            const auto begin = Clock::now();
            const auto image = decode_image(picture.bytes, service_->options.limits);
            picture.width = image.width;
            picture.height = image.height;
            detector_->detect(image, deadline_, [self = shared_from_this(), index](Outcome outcome) {
                self->detected(index, std::move(outcome));
            });
            picture.decoded = Clock::now() - begin;
        } catch (...) {
            detected(index, {{}, std::current_exception()});
        }
        finish();
    }

    void detected(std::size_t index, Outcome outcome) noexcept {
        pictures_[index].outcome = std::move(outcome);
        if (pictures_[index].outcome.error) {
            auto first = first_failed_.load();
            while (index < first && !first_failed_.compare_exchange_weak(first, index)) {
            }
        }
        finish();
    }

    void finish() noexcept {
        if (--waiting_ == 0) {
            done_([self = shared_from_this()] { return self->answer(); });
        }
    }

    Response answer() {
        leave();
        note_health();
        if (first_failed_ < pictures_.size()) {
            return failure(first_failed_);
        }
        const auto& manifest = detector_->manifest();
        Response response;
        response.body = "{\"model\":" +
                        Json({{"name", manifest.model_name}, {"content_hash", manifest.content_hash}})
                            .dump(-1, ' ', false, Json::error_handler_t::replace) +
                        ",\"images\":[";
        for (std::size_t i = 0; i < pictures_.size(); ++i) {
            response.body += i == 0 ? "" : ",";
            append(response.body, pictures_[i], wanted_, manifest.classes);
            const auto& found = pictures_[i].outcome.found;
            service_->metrics.image(pictures_[i].decoded, found.queued, found.detections.size());
        }
        response.body += "]}\n";
        return response;
    }

    void note_health() const {
        for (const auto& picture : pictures_) {
            if (!picture.outcome.error) {
                service_->failed_in_a_row = 0;
                continue;
            }
            try {
                std::rethrow_exception(picture.outcome.error);
            } catch (const EngineError&) {
                ++service_->failed_in_a_row;
            } catch (...) {  // says nothing about the engine
            }
        }
    }

    Response failure(std::size_t index) const {
        try {
            std::rethrow_exception(pictures_[index].outcome.error);
        } catch (const ImageTooLargeError& error) {
            return error_response(413, "image-too-large", which(index) + error.what());
        } catch (const ImageError& error) {
            return error_response(400, "bad-image", which(index) + error.what());
        } catch (const OverloadedError& error) {
            return busy_response("overloaded", error.what());
        } catch (const DeadlineError& error) {
            return error_response(504, "deadline-exceeded", error.what());
        } catch (const StoppedError&) {
            return busy_response("stopping", "the service is stopping; send the request again");
        } catch (const EngineError& error) {
            service_->log.write(Level::error, "the engine failed", {{"reason", error.what()}});
            // The reason may name files and devices, which are not the client's.
            return error_response(500, "engine-failed", "the engine failed; the reason is in the service's log");
        } catch (const std::exception& error) {
            service_->log.write(Level::error, "a request failed", {{"reason", error.what()}});
            return error_response(500, "internal", "the request failed; the reason is in the service's log");
        }
    }

    const std::shared_ptr<Impl> service_;
    const Request request_;
    const std::function<void(Answer)> done_;
    std::shared_ptr<Detector> detector_;
    Wanted wanted_;
    std::vector<Picture> pictures_;
    bool refused_ = false;
    std::atomic<bool> left_{false};
    Clock::time_point deadline_;
    std::atomic<std::size_t> waiting_{0};
    std::atomic<std::size_t> first_failed_{0};
};

std::optional<Response> Service::Impl::refuse(const Head& head) const {
    const auto [path, query] = split_target(head.target);
    const auto* endpoint = find_endpoint(path);
    if (endpoint == nullptr) {
        return error_response(404, "not-found", "there is no " + quote(path) + "; GET / lists what there is");
    }
    if (!allows(*endpoint, head.method)) {
        auto response = error_response(
            405, "method-not-allowed",
            std::string(path) + " does not take " + quote(head.method) + "; allowed is " +
                std::string(endpoint->allow));
        response.headers.emplace_back("Allow", std::string(endpoint->allow));
        return response;
    }
    if (path == detect_path) {
        return refuse_detect(head, query);
    }
    if (head.chunked || head.length.value_or(0) > 0) {
        return error_response(413, "body-too-large", std::string(path) + " takes no body");
    }
    return std::nullopt;
}

std::optional<Response> Service::Impl::refuse_detect(const Head& head, std::string_view query) const {
    if (!head.length && !head.chunked) {
        return error_response(
            411, "length-required", "the request has neither Content-Length nor Transfer-Encoding: chunked");
    }
    if (head.length.value_or(0) > options.max_body) {
        return error_response(
            413, "body-too-large",
            "the body has " + std::to_string(*head.length) + " bytes, allowed are " + std::to_string(options.max_body));
    }
    if (!head.content_encoding.empty() && head.content_encoding != "identity") {
        return error_response(
            415, "unsupported-media-type",
            "the Content-Encoding is " + quote(head.content_encoding) + "; send the image as it is, without one");
    }
    const auto type = media_type(head.content_type);
    if (!is_image_type(type) && type != "multipart/form-data") {
        const std::vector<std::string_view> taken{
            "image/jpeg", "image/png", "application/octet-stream", "multipart/form-data"};
        return error_response(
            415, "unsupported-media-type",
            "the Content-Type is " + (type.empty() ? std::string("missing") : quote(type)) + "; expected " +
                listed(taken));
    }
    try {
        read_wanted(query, current()->manifest());
        if (type == "multipart/form-data") {
            multipart_boundary(head.content_type);
        }
    } catch (const BadQuery& error) {
        return error_response(400, "bad-query", error.what());
    } catch (const MultipartError& error) {
        return error_response(400, "bad-multipart", error.what());
    }
    if (in_flight >= options.max_requests) {
        return all_taken(options.max_requests);
    }
    return std::nullopt;
}

Response Service::Impl::get(std::string_view path) const {
    if (path == "/v1/model") {
        return model();
    }
    if (path == "/healthz") {
        return health();
    }
    if (path == "/readyz") {
        if (leaving) {
            return error_response(503, "stopping", "the service is stopping");
        }
        auto response = health();
        if (response.status == 200) {
            response.body = dumped({{"status", "ready"}});
        }
        return response;
    }
    if (path == "/metrics") {
        return {200, Metrics::content_type, metrics.text(current()->queued()), {}, {}};
    }
    Json list = Json::array();
    for (const auto& endpoint : endpoints) {
        list.push_back({{"path", endpoint.path}, {"methods", endpoint.allow}, {"what", endpoint.what}});
    }
    return json_response({{"service", "trtdet-serve"}, {"version", TRTDET_VERSION}, {"endpoints", list}});
}

Response Service::Impl::health() const {
    if (options.unhealthy_after > 0 && failed_in_a_row >= options.unhealthy_after) {
        return error_response(
            503, "engine-failed",
            "the engine failed on the last " + std::to_string(failed_in_a_row) +
                " images; the reason is in the service's log; the service must be started again");
    }
    return json_response({{"status", "ok"}});
}

Response Service::Impl::model() const {
    const auto detector = current();
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

Service::Service(ServiceOptions options, std::function<std::shared_ptr<Detector>()> current, Log& log, Metrics& metrics)
    : impl_(std::make_shared<Impl>(options, std::move(current), log, metrics)) {}

Service::~Service() {
    impl_->pool.join();
}

const ServiceOptions& Service::options() const {
    return impl_->options;
}

std::optional<Response> Service::refuse(const Head& head) const {
    return impl_->refuse(head);
}

void Service::handle(Request request, std::function<void(Answer)> done) {
    const auto path = split_target(request.head.target).path;
    if (path != detect_path) {
        done([impl = impl_, path = std::string(path)] { return impl->get(path); });
        return;
    }
    if (++impl_->in_flight > impl_->options.max_requests) {
        --impl_->in_flight;
        done([most = impl_->options.max_requests] { return all_taken(most); });
        return;
    }
    std::make_shared<Impl::Detection>(impl_, std::move(request), std::move(done))->start();
}

void Service::answered(const Head& head, const Response& response, Clock::duration took) const {
    const auto path = split_target(head.target).path;
    const auto* endpoint = find_endpoint(path);
    impl_->metrics.answered(endpoint == nullptr ? "other" : endpoint->path, response.status);
    if (path == detect_path && response.status == 200) {
        impl_->metrics.detected(took);
    }
    if (!response.error.empty()) {
        impl_->metrics.error(response.error);
    }
    if (impl_->log.shows(Level::debug)) {
        impl_->log.write(
            Level::debug, "answered",
            {{"method", head.method},
             {"target", head.target},
             {"status", std::to_string(response.status)},
             {"bytes", std::to_string(response.body.size())},
             {"ms", std::to_string(milliseconds(took))}});
    }
}

void Service::leave() {
    impl_->leaving = true;
}

}  // namespace trtdet::serve
