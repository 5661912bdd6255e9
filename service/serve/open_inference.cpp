#include "open_inference.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <functional>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>

#include "inference_request.hpp"
#include "memory_budget.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/version.hpp"
#include "work.hpp"

namespace trtdet::serve {
namespace {

using OrderedJson = nlohmann::ordered_json;

constexpr std::string_view root = "/v2";

// Bundles have no versions; clients that must name one name this one.
constexpr std::string_view only_version = "1";

// An output, of one kind for every bundle: what suppression left.
struct OutputTensor {
    std::string_view name;
    bool is_float;
    std::vector<std::size_t> shape;  // of one image
    bool is_part = false;            // beside boxes, scores and classes

    std::size_t values() const {
        std::size_t count = 1;
        for (const auto size : shape) {
            count *= size;
        }
        return count;
    }
};

std::vector<OutputTensor> outputs_of(const Manifest& manifest) {
    const auto room = static_cast<std::size_t>(manifest.nms.max_detections);
    std::vector<OutputTensor> outputs{
        {"num_dets", false, {1}}, {"boxes", true, {room, 4}}, {"scores", true, {room}}, {"classes", false, {room}}};
    if (manifest.masks) {
        const auto side = static_cast<std::size_t>(manifest.masks->size);
        outputs.push_back({"masks", true, {room, side, side}, true});
    }
    if (const auto& masks = manifest.parts.masks) {
        const auto count = static_cast<std::size_t>(masks->count);
        outputs.push_back({"mask_coefficients", true, {room, count}, true});
        outputs.push_back(
            {"prototypes",
             true,
             {count, static_cast<std::size_t>(masks->height), static_cast<std::size_t>(masks->width)},
             true});
    }
    if (const auto& keypoints = manifest.parts.keypoints) {
        outputs.push_back({"keypoints", true, {room, keypoints->names.size(), 3}, true});
    }
    if (manifest.parts.rotated_boxes) {
        outputs.push_back({"rotated_boxes", true, {room, 5}, true});
    }
    return outputs;
}

std::vector<std::string_view> output_names(const Manifest& manifest) {
    std::vector<std::string_view> names;
    for (const auto& output : outputs_of(manifest)) {
        names.push_back(output.name);
    }
    return names;
}

const char* datatype(const OutputTensor& output) {
    return output.is_float ? "FP32" : "INT32";
}

// Writes the values of a tensor, as they stand in JSON or as bytes.
class Values {
public:
    explicit Values(bool binary) : binary_(binary) {}

    void put(float number) {
        if (binary_) {
            put_bytes(number);
        } else {
            put_text(std::isfinite(number) ? shortest(number) : "null");
        }
    }

    void put(std::int32_t number) {
        if (binary_) {
            put_bytes(number);
        } else {
            put_text(std::to_string(number));
        }
    }

    std::string take() { return std::move(text_); }

private:
    template <typename Number>
    void put_bytes(Number number) {
        char raw[sizeof number];
        std::memcpy(raw, &number, sizeof number);
        text_.append(raw, sizeof number);
    }

    void put_text(const std::string& text) { text_ += (text_.empty() ? "" : ",") + text; }

    const bool binary_;
    std::string text_;
};

// What the network gives for the detections beside boxes, scores and classes.
std::vector<float> part_of(const Found& found, std::string_view name) {
    std::vector<float> values;
    if (name == "masks") {
        return found.masks.probabilities;
    }
    if (name == "mask_coefficients") {
        return found.prototype_masks.coefficients;
    }
    if (name == "prototypes") {
        return found.prototype_masks.prototypes;
    }
    if (name == "keypoints") {
        for (const Keypoint& one : found.keypoints) {
            values.insert(values.end(), {one.x, one.y, one.score});
        }
    }
    if (name == "rotated_boxes") {
        for (const RotatedBox& one : found.rotated_boxes) {
            values.insert(values.end(), {one.x, one.y, one.width, one.height, one.angle});
        }
    }
    return values;
}

// The values of an output, zeros after the last detection of each image.
template <typename Fill>
std::string tensor(const OutputTensor& output, bool binary, std::size_t images, const Fill& found_in) {
    Values values(binary);
    for (std::size_t i = 0; i < images; ++i) {
        const Found& found = found_in(i);
        const auto& detections = found.detections;
        if (output.is_part) {
            const auto part = part_of(found, output.name);
            for (std::size_t place = 0; place < output.values(); ++place) {
                values.put(place < part.size() ? part[place] : 0.0F);
            }
            continue;
        }
        const auto count = output.name == "num_dets" ? std::size_t{1} : output.shape[0];
        for (std::size_t row = 0; row < count; ++row) {
            const auto detection = row < detections.size() ? detections[row] : Detection{};
            if (output.name == "num_dets") {
                values.put(static_cast<std::int32_t>(detections.size()));
            } else if (output.name == "boxes") {
                for (const float side : {detection.box.x1, detection.box.y1, detection.box.x2, detection.box.y2}) {
                    values.put(side);
                }
            } else if (output.name == "scores") {
                values.put(detection.score);
            } else {
                values.put(static_cast<std::int32_t>(detection.class_index));
            }
        }
    }
    return values.take();
}

// A request to infer.
class Inference : public Work {
public:
    Inference(std::shared_ptr<Context> context, Served& model, std::unique_ptr<Place> place, Request request, Done done)
        : Work(std::move(context), model, std::move(place), std::move(request), std::move(done)),
          memory_(context_->decoding, client_) {}

    // Numbers in JSON take a while to read.
    void begin() {
        post([self = shared_from_this(), this] { parse(); });
    }

private:
    void parse() noexcept {
        try {
            read();
        } catch (...) {
            end_without_memory();
        }
    }

    void read() {
        try {
            if (!detector_) {
                return refuse(unloaded_model(model_));
            }
            if (!wanted()) {
                throw DeadlineError("the time for the answer was over before the request was read");
            }
            if (!unpack()) {
                return;
            }
            const auto& manifest = detector_->manifest();
            const InferenceLimits limits{context_->options.max_images, [this] { return wanted(); }};
            const std::string_view header = request_.head.inference_header_length;
            memory_.wait_for(inference_memory(request_.body.size(), header, manifest.input, limits), deadline());
            inference_ = parse_inference(request_.body, header, manifest.input, output_names(manifest), limits);
            if (!inference_.values.empty()) {
                release_body();
            }
            memory_.set(inference_.values.size() * sizeof(float));
        } catch (const InferenceError& error) {
            return refuse(error_response(400, "bad-inference", error.what()));
        } catch (const DeadlineError& error) {
            return refuse(error_response(504, "deadline-exceeded", error.what()));
        } catch (const MemoryLimitError& error) {
            return refuse(error.response());
        } catch (const std::bad_alloc&) {
            throw;
        } catch (const std::exception& error) {
            context_->log.write(
                Level::error, "a request failed", {{"reason", error.what()}, {"request_id", request_.head.request_id}});
            return refuse(error_response(500, "internal", "the request failed; the reason is in the service's log"));
        }
        start(inference_.images);
    }

    std::string which(std::size_t index) const override {
        return inference_.images > 1 ? "image " + std::to_string(index) + ": " : "";
    }

    void prepare(std::size_t index) override {
        if (!inference_.files.empty()) {
            MemoryBudget::Share memory(context_->decoding, client_);
            const auto image = decode(inference_.files[index], memory);
            return detector_->detect(image, deadline(), settled(index), client_->number);
        }
        detector_->detect_input(inference_.image(index), deadline(), settled(index), client_->number);
    }

    Response answer() override {
        if (failed()) {
            return failure(first_failed());
        }
        try {
            return outputs();
        } catch (const MemoryLimitError& error) {
            return error.response();
        }
    }

    // Throws MemoryLimitError.
    Response outputs() {
        const auto& manifest = detector_->manifest();
        for (std::size_t i = 0; i < inference_.images; ++i) {
            context_->metrics.image(std::nullopt, found(i).queued, found(i).detections.size());
        }
        const auto all = outputs_of(manifest);
        const auto memory = std::make_shared<MemoryBudget::Share>(context_->decoding, client_);
        memory->set(answer_bytes(all));
        std::string json =
            "{\"model_name\":" + json_text(model_.name) + ",\"model_version\":\"" + std::string(only_version) + "\"";
        if (!inference_.id.empty()) {
            json += ",\"id\":" + json_text(inference_.id);
        }
        json += ",\"parameters\":" + json_text({{"content_hash", manifest.content_hash}}) + ",\"outputs\":[";
        std::string bytes;
        bool any_binary = false;
        for (std::size_t i = 0; i < inference_.outputs.size(); ++i) {
            const auto [index, binary] = inference_.outputs[i];
            OrderedJson shape = all[index].shape;
            shape.insert(shape.begin(), inference_.images);
            auto values = tensor(all[index], binary, inference_.images, [this](std::size_t image) -> const Found& {
                return found(image);
            });
            json += std::string(i == 0 ? "" : ",") + "{\"name\":\"" + std::string(all[index].name) +
                    "\",\"datatype\":\"" + datatype(all[index]) + "\",\"shape\":" + shape.dump();
            if (binary) {
                json += ",\"parameters\":{\"binary_data_size\":" + std::to_string(values.size()) + "}}";
                bytes += values;
                any_binary = true;
            } else {
                json += ",\"data\":[" + values + "]}";
            }
        }
        json += "]}";
        Response response;
        if (any_binary) {
            response.content_type = "application/octet-stream";
            response.headers.emplace_back("Inference-Header-Content-Length", std::to_string(json.size()));
        }
        response.body = std::move(json) + bytes;
        memory->set(response.body.size());
        response.held = memory;
        return response;
    }

    // At most, while it is written: the longest number has 15 letters and a comma, and bytes are copied once.
    std::uint64_t answer_bytes(const std::vector<OutputTensor>& all) const {
        std::uint64_t bytes = 4096;
        for (const auto& output : inference_.outputs) {
            bytes += std::uint64_t{all[output.index].values()} * inference_.images * (output.binary ? 8 : 32);
        }
        return bytes;
    }

    InferenceRequest inference_;
    MemoryBudget::Share memory_;  // of its numbers
};

// What is wrong with the model and the version that a path names.
std::optional<Response> check_names(const Context& context, const Words& words) {
    if (context.find(words[0]) == nullptr) {
        return unknown_model(context, words[0]);
    }
    if (words.size() > 1 && words[1] != only_version) {
        return error_response(
            404, "unknown-model",
            "the model has no version " + quote(words[1]) + "; its only version is \"" + std::string(only_version) +
                "\"");
    }
    return std::nullopt;
}

Response metadata(const Served& model) {
    const auto detector = model.current();
    if (!detector) {
        return unloaded_model(model);
    }
    const auto& manifest = detector->manifest();
    const auto& preprocess = manifest.input.preprocess;
    OrderedJson outputs = OrderedJson::array();
    for (const auto& output : outputs_of(manifest)) {
        OrderedJson shape = output.shape;
        shape.insert(shape.begin(), -1);
        outputs.push_back({{"name", output.name}, {"datatype", datatype(output)}, {"shape", shape}});
    }
    return json_response(
        {{"name", model.name},
         {"versions", {only_version}},
         {"platform", "trtdet_bundle"},
         {"inputs",
          {{{"name", manifest.input.name},
            {"datatype", "FP32"},
            {"shape", {-1, 3, preprocess.height, preprocess.width}}}}},
         {"outputs", outputs},
         {"parameters", {{"content_hash", manifest.content_hash}, {"runs_on", detector->ran_on()}}}});
}

// Model configuration as Triton has it (model_config.proto), with what is known of a bundle.
Response configuration(const Served& model) {
    const auto detector = model.current();
    if (!detector) {
        return unloaded_model(model);
    }
    const auto& manifest = detector->manifest();
    const auto& preprocess = manifest.input.preprocess;
    OrderedJson outputs = OrderedJson::array();
    for (const auto& output : outputs_of(manifest)) {
        outputs.push_back(
            {{"name", output.name},
             {"data_type", output.is_float ? "TYPE_FP32" : "TYPE_INT32"},
             {"dims", output.shape}});
    }
    return json_response(
        {{"name", model.name},
         {"platform", "trtdet_bundle"},
         {"backend", "trtdet"},
         {"version_policy", {{"latest", {{"num_versions", 1}}}}},
         {"max_batch_size", manifest.input.max_batch},
         {"input",
          {{{"name", manifest.input.name},
            {"data_type", "TYPE_FP32"},
            {"dims", {3, preprocess.height, preprocess.width}}}}},
         {"output", outputs},
         {"parameters", {{"runs_on", {{"string_value", detector->ran_on()}}}}},
         {"dynamic_batching", OrderedJson::object()}});
}

OrderedJson spent(const Spent& what) {
    return {{"count", what.count}, {"ns", what.time.count()}};
}

// Statistics as Triton has them: times are of requests, as often as these succeeded. compute_output is a part of the
// run here.
OrderedJson statistics_of(const Served& model) {
    using std::chrono::duration_cast;
    using std::chrono::milliseconds;
    const auto counts = model.statistics.counts();
    OrderedJson batches = OrderedJson::array();
    for (const auto& [size, images] : counts.batches) {
        const auto runs = images.count / static_cast<std::uint64_t>(size);
        batches.push_back(
            {{"batch_size", size},
             {"compute_input", spent({runs, {}})},
             {"compute_infer", spent({runs, images.time / size})},
             {"compute_output", spent({runs, {}})}});
    }
    return {
        {"name", model.name},
        {"version", only_version},
        {"last_inference", duration_cast<milliseconds>(counts.last.time_since_epoch()).count()},
        {"inference_count", counts.images()},
        {"execution_count", counts.executions()},
        {"inference_stats",
         {{"success", spent(counts.success)},
          {"fail", spent(counts.fail)},
          {"queue", spent(counts.queue)},
          {"compute_input", spent(counts.input)},
          {"compute_infer", spent(counts.infer)},
          {"compute_output", spent({counts.success.count, {}})},
          {"cache_hit", spent({})},
          {"cache_miss", spent({})}}},
        {"batch_stats", batches}};
}

Response statistics(const std::vector<const Served*>& models) {
    OrderedJson all = OrderedJson::array();
    for (const auto* model : models) {
        all.push_back(statistics_of(*model));
    }
    return json_response({{"model_stats", all}});
}

Response model_readiness(const Context& context, const Served& model) {
    if (context.leaving) {
        return error_response(503, "stopping", "the service is stopping");
    }
    if (!model.current()) {
        return unloaded_model(model);
    }
    if (auto trouble = context.trouble(model)) {
        return std::move(*trouble);
    }
    return json_response({{"name", model.name}, {"ready", true}});
}

Response server_readiness(const Context& context) {
    if (context.leaving) {
        return error_response(503, "stopping", "the service is stopping");
    }
    return context.trouble().value_or(json_response({{"ready", true}}));
}

Response repository(const Context& context) {
    OrderedJson models = OrderedJson::array();
    for (const auto& model : context.models) {
        const auto trouble = model->current() ? model->health.trouble() : std::optional<std::string>("unloaded");
        models.push_back(
            {{"name", model->name},
             {"version", only_version},
             {"state", trouble ? "UNAVAILABLE" : "READY"},
             {"reason", trouble.value_or("")}});
    }
    return json_response(models);
}

Endpoint repository_endpoint(const std::shared_ptr<Context>& context) {
    constexpr std::uint64_t most = 4096;  // it may hold {"ready": true}, which changes nothing: all are ready
    return {
        "/v2/repository/index",
        "POST",
        "the models that are served",
        [](const Head& head, const Words& /*words*/) { return refuse_body(head, most); },
        [context](const Request& /*request*/, const Words& /*words*/, const Done& done) {
            done([context] { return repository(*context); });
        },
        false,
        Ports::both};
}

// What the body of a request to load or unload may hold: a list of parameters, of which those that change how a model
// is made have no meaning here.
//
// Throws InferenceError.
void check_change(std::string_view body, bool load) {
    if (body.empty()) {
        return;
    }
    const auto json = OrderedJson::parse(body, nullptr, false);
    const auto parameters = json.is_object() ? json.value("parameters", OrderedJson::object()) : OrderedJson();
    if (!parameters.is_object()) {
        throw InferenceError("the body is not a JSON object, or its parameters are none");
    }
    for (const auto& [name, value] : parameters.items()) {
        if (load || name != "unload_dependents") {
            throw InferenceError(
                "the parameter " + quote(name) +
                " is not supported: a model is loaded from its bundle's folder as it is; leave the parameters out");
        }
    }
}

// Loads or unloads a model; the answer comes when that is done.
Endpoint change_endpoint(const std::shared_ptr<Context>& context, bool load) {
    constexpr std::uint64_t most = 65536;
    return {
        std::string("/v2/repository/models/{model}/") + (load ? "load" : "unload"),
        "POST",
        load ? "loads a model anew from its bundle" : "ends the service of a model, and frees what it holds",
        [context](const Head& head, const Words& words) -> std::optional<Response> {
            return context->find(words[0]) == nullptr ? unknown_model(*context, words[0]) : refuse_body(head, most);
        },
        [context, load](const Request& request, const Words& words, const Done& done) {
            try {
                check_change(request.body, load);
            } catch (const InferenceError& error) {
                return done([text = std::string(error.what())] { return error_response(400, "bad-inference", text); });
            }
            const auto& model = *context->find(words[0]);
            model.change(load, [done, load, name = model.name](const std::string& problem) {
                done([load, name, problem] {
                    return problem.empty() ? json_response(OrderedJson::object())
                                           : error_response(
                                                 409, "load-failed",
                                                 "the model " + quote(name) + " was not " +
                                                     (load ? "loaded: " : "unloaded: ") + problem);
                });
            });
        },
        false,
        Ports::admin};
}

Endpoint infer_endpoint(const std::shared_ptr<Context>& context, std::string path, std::string what) {
    return {
        std::move(path),
        "POST",
        std::move(what),
        [context](const Head& head, const Words& words) -> std::optional<Response> {
            if (auto refusal = check_names(*context, words)) {
                return refusal;
            }
            if (const auto& model = *context->find(words[0]); !model.current()) {
                return unloaded_model(model);
            }
            if (auto refusal = refuse_body(head, context->options.max_body)) {
                return refusal;
            }
            return Place::refusal(*context, head);
        },
        [context](Request request, const Words& words, Done done) {
            auto taken = Place::take(context, request.head);
            if (auto* const refusal = std::get_if<Response>(&taken)) {
                return done([refusal = std::move(*refusal)] { return refusal; });
            }
            std::make_shared<Inference>(
                context, *context->find(words[0]), std::get<0>(std::move(taken)), std::move(request), std::move(done))
                ->begin();
        },
        true};
}

// A page of a model, with and without a version.
void add_pages(
    std::vector<Endpoint>& endpoints, const std::shared_ptr<Context>& context, const std::string& rest,
    const std::string& what, const std::function<Response(const Served& model)>& answer) {
    for (const std::string version : {"", "/versions/{version}"}) {
        endpoints.push_back(page("/v2/models/{model}" + version + rest, what, [context, answer](const Words& words) {
            if (auto refusal = check_names(*context, words)) {
                return std::move(*refusal);
            }
            return answer(*context->find(words[0]));
        }));
    }
}

}  // namespace

std::vector<Endpoint> open_inference_endpoints(const std::shared_ptr<Context>& context) {
    std::vector<Endpoint> endpoints{
        page(
            "/v2", "the server, for clients of the Open Inference Protocol",
            [](const Words& /*words*/) {
                return json_response(
                    {{"name", "trtdet-serve"},
                     {"version", TRTDET_VERSION},
                     {"extensions", {"binary_tensor_data", "model_configuration", "model_repository", "statistics"}}});
            }),
        page(
            "/v2/health/live", "200 while the process works",
            [context](const Words& /*words*/) { return context->trouble().value_or(json_response({{"live", true}})); }),
        page("/v2/health/ready", "200 while it should be sent requests", [context](const Words& /*words*/) {
            return server_readiness(*context);
        })};
    // Before the model that has this name, as Triton does.
    endpoints.push_back(page("/v2/models/stats", "the same of all models", [context](const Words& /*words*/) {
        std::vector<const Served*> all;
        for (const auto& model : context->models) {
            all.push_back(model.get());
        }
        return statistics(all);
    }));
    add_pages(endpoints, context, "", "inputs and outputs of a model", metadata);
    add_pages(endpoints, context, "/config", "configuration of a model, as Triton's", configuration);
    add_pages(endpoints, context, "/stats", "what a model has done, as Triton counts it", [](const Served& model) {
        return statistics({&model});
    });
    add_pages(
        endpoints, context, "/ready", "200 while the model should be sent requests",
        [context](const Served& model) { return model_readiness(*context, model); });
    endpoints.push_back(infer_endpoint(context, "/v2/models/{model}/infer", "tensors in, detections out as tensors"));
    endpoints.push_back(infer_endpoint(context, "/v2/models/{model}/versions/{version}/infer", "the same"));
    endpoints.push_back(repository_endpoint(context));
    endpoints.push_back(change_endpoint(context, true));
    endpoints.push_back(change_endpoint(context, false));
    return endpoints;
}

void use_error_form(const Head& head, Response& response) {
    const auto path = split_target(head.target).path;
    if (!response.error.empty() && (path == root || path.substr(0, root.size() + 1) == std::string(root) + "/")) {
        response.body = json_text({{"error", response.message}}) + "\n";
    }
}

}  // namespace trtdet::serve
