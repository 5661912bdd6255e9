#include "detect.hpp"

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

#include "memory_budget.hpp"
#include "multipart.hpp"
#include "trtdet/errors.hpp"
#include "work.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::ordered_json;

constexpr std::string_view form = "multipart/form-data";

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

// The bytes say what an image is; none of these says otherwise. The last is what curl sends where nothing is named.
bool is_image_type(std::string_view type) {
    return type.empty() || type == "image/jpeg" || type == "image/png" || type == "image/webp" ||
           type == "application/octet-stream" || type == "application/x-www-form-urlencoded";
}

template <typename Number>
std::optional<Number> parsed(const std::string& text) {
    Number number{};
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
    return error == std::errc() && end == text.data() + text.size() ? std::optional(number) : std::nullopt;
}

// What a request wants to see of the detections.
struct Wanted {
    float score_threshold = 0;
    int max_detections = 0;
    bool partial = false;  // what was found in some images, where others failed
    bool masks = false;

    // How many of an image's detections are given. The best come first.
    std::size_t count(const Found& found) const {
        const auto& all = found.detections;
        const auto most = std::min(all.size(), static_cast<std::size_t>(max_detections));
        const auto end = std::find_if(
            all.begin(), all.begin() + static_cast<std::ptrdiff_t>(most),
            [this](const trtdet::Detection& one) { return !(one.score > score_threshold); });
        return static_cast<std::size_t>(end - all.begin());
    }
};

// Throws BadQuery.
bool flag(const std::string& key, const std::string& value) {
    if (value != "true" && value != "false") {
        throw BadQuery(key + " is " + quote(value) + ", allowed is true or false");
    }
    return value == "true";
}

// Throws BadQuery.
Wanted read_wanted(std::string_view query, const Manifest& manifest, const ServiceOptions& options) {
    Wanted wanted;
    wanted.score_threshold = std::max(options.score_threshold, manifest.nms.score_threshold);
    wanted.max_detections = manifest.nms.max_detections;
    const bool has_masks = manifest.masks || manifest.parts.masks;
    wanted.masks = has_masks;
    if (options.max_detections > 0) {
        wanted.max_detections = std::min(options.max_detections, wanted.max_detections);
    }
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
        } else if (key == "partial") {
            wanted.partial = flag(key, value);
        } else if (key == "masks") {
            wanted.masks = flag(key, value);
            if (wanted.masks && !has_masks) {
                throw BadQuery("masks is true, and the model gives none; leave it out");
            }
        } else {
            throw BadQuery(
                "the query has the key " + quote(key) +
                "; allowed are score_threshold, max_detections, masks and partial");
        }
    }
    return wanted;
}

// One image of a request, from its bytes to its detections.
struct Picture {
    std::string name;  // as the client called it; empty where it did not
    std::string_view bytes;
    int width = 0;
    int height = 0;
    Clock::duration decoded{};
    std::vector<std::string> masks{};  // of the detections that are given, as text; empty where none are wanted
    Clock::duration pasted{};
};

// Appends what the answer says of an image. Floats are written with as many digits as bring back the same float32, and
// by hand: an answer can have thousands of them.
void append(
    std::string& text, const Picture& picture, const Found& found, const Wanted& wanted,
    const std::vector<std::string>& classes) {
    const auto number = [&text](float value) { text += std::isfinite(value) ? shortest(value) : "null"; };
    text += "{";
    if (!picture.name.empty()) {
        text += "\"name\":" + json_text(picture.name) + ",";
    }
    text += "\"width\":" + std::to_string(picture.width) + ",\"height\":" + std::to_string(picture.height) +
            ",\"detections\":[";
    const auto list = [&](std::initializer_list<float> values) {
        char before = '[';
        for (const float value : values) {
            text += before;
            number(value);
            before = ',';
        }
        text += "]";
    };
    const std::size_t count = wanted.count(found);
    const std::size_t keypoints = found.detections.empty() ? 0 : found.keypoints.size() / found.detections.size();
    for (std::size_t place = 0; place < count; ++place) {
        const auto& detection = found.detections[place];
        const auto& box = detection.box;
        text += place == 0 ? "{\"box\":" : ",{\"box\":";
        list({box.x1, box.y1, box.x2, box.y2});
        text += ",\"score\":";
        number(detection.score);
        text += ",\"class\":" + std::to_string(detection.class_index) + ",\"name\":";
        const auto index = static_cast<std::size_t>(detection.class_index);
        text += index < classes.size() ? json_text(classes[index]) : "null";
        if (wanted.masks) {
            // The letters of a mask go from '0' to 'o', of which JSON writes one in another way.
            text += ",\"mask\":{\"size\":[" + std::to_string(picture.height) + "," + std::to_string(picture.width) +
                    "],\"counts\":\"" + picture.masks[place] + "\"}";
        }
        for (std::size_t one = 0; one < keypoints; ++one) {
            const Keypoint& keypoint = found.keypoints[place * keypoints + one];
            text += one == 0 ? ",\"keypoints\":[" : ",";
            list({keypoint.x, keypoint.y, keypoint.score});
        }
        text += keypoints > 0 ? "]" : "";
        if (!found.rotated_boxes.empty()) {
            const RotatedBox& rotated = found.rotated_boxes[place];
            text += ",\"rotated_box\":";
            list({rotated.x, rotated.y, rotated.width, rotated.height, rotated.angle});
        }
        text += "}";
    }
    Json times = {
        {"decode", milliseconds(picture.decoded)},
        {"queue", milliseconds(found.queued)},
        {"run", milliseconds(found.ran)}};
    if (wanted.masks) {
        times["masks"] = milliseconds(picture.pasted);
    }
    text += "],\"batch\":" + std::to_string(found.batch) + ",\"ms\":" + times.dump() + "}";
}

// The same of an image that failed.
void append(std::string& text, const Picture& picture, const Response& failure) {
    text += "{";
    if (!picture.name.empty()) {
        text += "\"name\":" + json_text(picture.name) + ",";
    }
    text += "\"error\":" + json_text({{"type", failure.error}, {"message", failure.message}}) + "}";
}

// A request to detect.
class Detection : public Work {
public:
    Detection(std::shared_ptr<Context> context, Served& model, std::unique_ptr<Place> place, Request request, Done done)
        : Work(std::move(context), model, std::move(place), std::move(request), std::move(done)) {}

    void begin() {
        if (is_packed()) {
            post([self = shared_from_this(), this] { begin_packed(); });
        } else {
            begin_with_body();
        }
    }

private:
    void begin_packed() noexcept {
        try {
            if (unpack()) {
                begin_with_body();
            }
        } catch (...) {
            end_without_memory();
        }
    }

    void begin_with_body() {
        try {
            if (!detector_) {
                return refuse(unloaded_model(model_));
            }
            wanted_ = read_wanted(split_target(request_.head.target).query, detector_->manifest(), context_->options);
            if (auto refusal = find_pictures()) {
                return refuse(std::move(*refusal));
            }
        } catch (const BadQuery& error) {
            return refuse(error_response(400, "bad-query", error.what()));
        } catch (const TooManyPartsError& error) {
            return refuse(error_response(413, "too-many-images", error.what()));
        } catch (const MultipartError& error) {
            return refuse(error_response(400, "bad-multipart", error.what()));
        }
        start(pictures_.size());
    }

    std::optional<Response> find_pictures() {
        const auto& head = request_.head;
        if (request_.body.empty()) {
            return error_response(400, "empty-body", "the body is empty; send a JPEG, PNG or WebP image");
        }
        if (media_type(head.content_type) != form) {
            pictures_.emplace_back().bytes = request_.body;
            return std::nullopt;
        }
        MultipartLimits limits;
        limits.max_parts = context_->options.max_images;
        for (auto& part : parse_multipart(request_.body, multipart_boundary(head.content_type), limits)) {
            auto& picture = pictures_.emplace_back();
            picture.name = part.filename.empty() ? std::move(part.name) : std::move(part.filename);
            picture.bytes = part.body;
            if (!is_image_type(part.content_type)) {
                return error_response(
                    415, "unsupported-media-type",
                    which(pictures_.size() - 1) + "it has the Content-Type " + quote(part.content_type) +
                        "; expected image/jpeg, image/png, image/webp or application/octet-stream");
            }
        }
        return std::nullopt;
    }

    // Where a request has several images, which one a message is about.
    std::string which(std::size_t index) const override {
        if (media_type(request_.head.content_type) != form) {
            return {};
        }
        const auto& name = pictures_[index].name;
        return "image " + std::to_string(index) + (name.empty() ? "" : " (" + quote(name) + ")") + ": ";
    }

    bool all_or_nothing() const override { return !wanted_.partial; }

    void prepare(std::size_t index) override {
        auto& picture = pictures_[index];
        const auto begin = Clock::now();
        MemoryBudget::Share memory(context_->decoding, client_);
        const auto image = decode(picture.bytes, memory);
        picture.width = image.width;
        picture.height = image.height;
        detector_->detect(image, deadline(), settled(index), client_->number);
        picture.decoded = Clock::now() - begin;
    }

    bool has_more() const override { return wanted_.masks; }

    // Pastes the masks that are given.
    //
    // Throws ImageTooLargeError: those of the request are too large. DeadlineError: nobody waits for them any more.
    void complete(std::size_t index, const Found& found) override {
        auto& picture = pictures_[index];
        const auto begin = Clock::now();
        const std::size_t count = wanted_.count(found);
        for (std::size_t place = 0; place < count; ++place) {
            if (!wanted()) {
                throw DeadlineError("the time for the answer was over before the masks were pasted");
            }
            std::string text;
            for (const char letter : found.mask(place).counts()) {
                text.append(letter == '\\' ? 2 : 1, letter);
            }
            if ((mask_bytes_ += text.size()) > context_->options.max_masks) {
                throw ImageTooLargeError(
                    "the masks of the request are larger than " + std::to_string(context_->options.max_masks) +
                    " bytes; ask for fewer with score_threshold or max_detections, leave them out with masks=false, or "
                    "send smaller images");
            }
            picture.masks.push_back(std::move(text));
        }
        picture.pasted = Clock::now() - begin;
    }

    Response answer() override {
        std::size_t failures = 0;
        for (std::size_t i = 0; i < pictures_.size(); ++i) {
            failures += failed(i) ? 1 : 0;
        }
        if (failures > 0 && (!wanted_.partial || failures == pictures_.size())) {
            return failure(first_failed());
        }
        const auto& manifest = detector_->manifest();
        Response response;
        response.body =
            "{\"model\":" + json_text({{"name", manifest.model_name}, {"content_hash", manifest.content_hash}}) +
            ",\"images\":[";
        for (std::size_t i = 0; i < pictures_.size(); ++i) {
            response.body += i == 0 ? "" : ",";
            if (failed(i)) {
                const auto why = failure(i);
                append(response.body, pictures_[i], why);
                context_->metrics.error(why.error);
                continue;
            }
            append(response.body, pictures_[i], found(i), wanted_, manifest.classes);
            context_->metrics.image(pictures_[i].decoded, found(i).queued, found(i).detections.size());
        }
        response.body += "]}\n";
        return response;
    }

    Wanted wanted_;
    std::vector<Picture> pictures_;
    std::atomic<std::uint64_t> mask_bytes_{0};  // of all of its images
};

std::optional<Response> refuse_detect(const Context& context, const Served& model, const Head& head) {
    const auto detector = model.current();
    if (!detector) {
        return unloaded_model(model);
    }
    if (auto refusal = refuse_body(head, context.options.max_body)) {
        return refusal;
    }
    const auto type = media_type(head.content_type);
    if (!is_image_type(type) && type != form) {
        const std::vector<std::string_view> taken{
            "image/jpeg", "image/png", "image/webp", "application/octet-stream", form};
        return error_response(
            415, "unsupported-media-type",
            "the Content-Type is " + quote(type) + "; expected " + listed(taken) + ", or none");
    }
    try {
        read_wanted(split_target(head.target).query, detector->manifest(), context.options);
        if (type == form) {
            multipart_boundary(head.content_type);
        }
    } catch (const BadQuery& error) {
        return error_response(400, "bad-query", error.what());
    } catch (const MultipartError& error) {
        return error_response(400, "bad-multipart", error.what());
    }
    return Place::refusal(context, head);
}

Endpoint endpoint(
    const std::shared_ptr<Context>& context, std::string path, std::string what,
    const std::function<Served*(const Words&)>& find) {
    return {
        std::move(path),
        "POST",
        std::move(what),
        [context, find](const Head& head, const Words& words) -> std::optional<Response> {
            const auto* model = find(words);
            return model == nullptr ? unknown_model(*context, words[0]) : refuse_detect(*context, *model, head);
        },
        [context, find](Request request, const Words& words, Done done) {
            auto taken = Place::take(context, request.head);
            if (auto* const refusal = std::get_if<Response>(&taken)) {
                return done([refusal = std::move(*refusal)] { return refusal; });
            }
            std::make_shared<Detection>(
                context, *find(words), std::get<0>(std::move(taken)), std::move(request), std::move(done))
                ->begin();
        },
        true};
}

}  // namespace

std::vector<Endpoint> detect_endpoints(const std::shared_ptr<Context>& context) {
    return {
        endpoint(
            context, "/v1/detect", "detects on a JPEG, PNG or WebP image, or on several as multipart/form-data",
            [context](const Words& /*words*/) { return context->models.front().get(); }),
        endpoint(
            context, "/v1/models/{model}/detect", "the same by the model of this name",
            [context](const Words& words) { return context->find(words[0]); })};
}

}  // namespace trtdet::serve
