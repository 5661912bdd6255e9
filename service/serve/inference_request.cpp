#include "inference_request.hpp"

#include <algorithm>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "log.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::serve {
namespace {

using Json = nlohmann::json;
using Event = Json::parse_event_t;

constexpr int max_depth = 12;
constexpr std::size_t max_nodes = 10'000;  // beside those of a tensor
constexpr std::size_t node_bytes = 128;    // of JSON, at most, with its part of the list or object that it stands in

// Each takes some 50 ns to read.
constexpr std::size_t numbers_between_looks = 65'536;

// Numbers that there may be in the JSON of so many bytes: each is a digit and a comma.
std::size_t most_numbers(std::size_t json, const InputSpec& input, std::size_t max_images) {
    return std::min(max_images * input.preprocess.values(), json / 2 + 1);
}

// Lists that the numbers of an input may stand in, one in another.
std::size_t most_lists(const InputSpec& input, std::size_t max_images) {
    const auto rows = static_cast<std::size_t>(3) * static_cast<std::size_t>(input.preprocess.height);
    return max_images * (1 + 3 + rows);
}

// Takes the numbers of the input's 'data' out of a request's JSON while it is parsed.
class Reader {
public:
    // most: numbers in a tensor. lists: the lists that these may stand in, one in another.
    Reader(std::size_t most, std::size_t lists, const std::function<bool()>& wanted)
        : most_(most), left_(max_nodes + lists), wanted_(wanted) {}

    Json read(std::string_view text) {
        try {
            return Json::parse(
                text, [this](int depth, Event event, Json& parsed) { return keep(depth, event, parsed); });
        } catch (const Json::exception&) {
            throw InferenceError("the request is not JSON, or is cut; expected an object with 'inputs'");
        }
    }

    // Nothing where the input has no 'data'.
    std::optional<std::vector<float>> take() { return std::move(values_); }

private:
    // Where in the text the parser is: {"inputs": [{"data": [...]}]}.
    static constexpr int at_root_key = 1;
    static constexpr int at_input_key = 3;

    bool keep(int depth, Event event, const Json& parsed) {
        if (depth > max_depth) {
            throw InferenceError(
                "the request has lists or objects in more than " + std::to_string(max_depth) + " others");
        }
        if (event == Event::key && depth == at_root_key) {
            in_inputs_ = parsed == "inputs";
        }
        if (event == Event::key && in_inputs_ && depth == at_input_key && parsed == "data") {
            if (values_) {
                throw InferenceError("the request has 'data' twice; the model has one input");
            }
            values_.emplace().reserve(most_);
            in_data_ = true;
            return true;
        }
        if (in_data_ && depth == at_input_key && event != Event::array_start) {
            in_data_ = false;  // its end, or a value that is no list
        }
        if (in_data_ && event == Event::value) {
            if (!parsed.is_number()) {
                throw InferenceError("the input's data holds what is not a number");
            }
            if (values_->size() == most_) {
                throw InferenceError(
                    "the input's data has more than the " + std::to_string(most_) + " numbers that are allowed");
            }
            values_->push_back(parsed.get<float>());
            if (values_->size() % numbers_between_looks == 0 && wanted_ && !wanted_()) {
                throw DeadlineError("the time for the answer was over while the request was read");
            }
            return false;
        }
        if ((event == Event::value || event == Event::array_start || event == Event::object_start) && left_-- == 0) {
            throw InferenceError("the request has more lists, objects or values than any needs");
        }
        return true;
    }

    const std::size_t most_;
    std::size_t left_;
    const std::function<bool()>& wanted_;
    bool in_inputs_ = false;
    bool in_data_ = false;
    std::optional<std::vector<float>> values_;
};

const Json& member(const Json& object, const char* name, const char* of) {
    if (!object.is_object()) {
        throw InferenceError(std::string(of) + " is not an object");
    }
    const auto found = object.find(name);
    if (found == object.end()) {
        throw InferenceError(std::string(of) + " has no '" + name + "'");
    }
    return *found;
}

std::string text_member(const Json& object, const char* name, const char* of) {
    const auto& value = member(object, name, of);
    if (!value.is_string()) {
        throw InferenceError("'" + std::string(name) + "' of " + of + " is not a string");
    }
    return value.get<std::string>();
}

// Those of a request, an input or an output; empty where there are none.
Json parameters(const Json& object, const char* of) {
    auto found = object.value("parameters", Json::object());
    if (!found.is_object()) {
        throw InferenceError("'parameters' of " + std::string(of) + " is not an object");
    }
    for (const char* unknown : {"shared_memory_region", "classification"}) {
        if (found.contains(unknown)) {
            throw InferenceError("'" + std::string(unknown) + "' of " + of + " is not supported here");
        }
    }
    return found;
}

bool flag(const Json& parameters, const char* name, bool otherwise) {
    const auto found = parameters.find(name);
    if (found == parameters.end()) {
        return otherwise;
    }
    if (!found->is_boolean()) {
        throw InferenceError("the parameter '" + std::string(name) + "' is not true or false");
    }
    return found->get<bool>();
}

// Checks name, datatype and shape; returns how many images there are.
std::size_t check_input(const Json& input, const InputSpec& spec, std::size_t max_images, bool as_files) {
    if (const auto name = text_member(input, "name", "an input"); name != spec.name) {
        throw InferenceError("the model has no input " + quote(name) + "; expected " + quote(spec.name));
    }
    if (const auto datatype = text_member(input, "datatype", "the input"); !as_files && datatype != "FP32") {
        throw InferenceError(
            "the input's datatype is " + quote(datatype) + "; expected \"FP32\", or \"BYTES\" for image files");
    }
    const auto& shape = member(input, "shape", "the input");
    std::vector<std::int64_t> wanted{0, 3, spec.preprocess.height, spec.preprocess.width};
    std::string expected = ",3," + std::to_string(wanted[2]) + "," + std::to_string(wanted[3]);
    if (as_files) {
        // One file an image, with or without an axis of its own.
        wanted = shape.is_array() && shape.size() == 2 ? std::vector<std::int64_t>{0, 1} : std::vector<std::int64_t>{0};
        expected.clear();
    }
    bool same = shape.is_array() && shape.size() == wanted.size();
    for (std::size_t axis = 0; same && axis < wanted.size(); ++axis) {
        same = shape[axis].is_number_integer() && (axis == 0 ? shape[axis] >= 1 : shape[axis] == wanted[axis]);
    }
    if (!same || shape[0] > max_images) {
        throw InferenceError(
            "the input's shape is " + quote(shape.dump(-1, ' ', false, Json::error_handler_t::replace)) +
            "; expected [1 to " + std::to_string(max_images) + expected + "]");
    }
    return shape[0].get<std::size_t>();
}

// Whether the input's elements are files.
bool takes_files(const Json& input) {
    return input.is_object() && input.contains("datatype") && input["datatype"] == "BYTES";
}

// So many elements of the datatype BYTES, each after its length.
std::vector<std::string_view> elements(std::string_view bytes, std::size_t count) {
    std::vector<std::string_view> found;
    constexpr std::size_t prefix = 4;
    while (found.size() < count) {
        std::uint32_t length = 0;
        if (bytes.size() >= prefix) {
            std::memcpy(&length, bytes.data(), prefix);
        }
        if (bytes.size() < prefix || bytes.size() - prefix < length) {
            throw InferenceError(
                "the bytes behind the JSON end within element " + std::to_string(found.size()) + " of " +
                std::to_string(count) + "; each is its length, 4 bytes, little-endian, and a file");
        }
        found.push_back(bytes.substr(prefix, length));
        bytes.remove_prefix(prefix + length);
    }
    if (!bytes.empty()) {
        throw InferenceError(
            std::to_string(bytes.size()) + " bytes stand behind the last of the " + std::to_string(count) +
            " elements that the shape names");
    }
    return found;
}

std::vector<InferenceRequest::Output> wanted_outputs(const Json& request, const std::vector<std::string_view>& names) {
    const bool binary = flag(parameters(request, "the request"), "binary_data_output", false);
    std::vector<InferenceRequest::Output> wanted;
    const auto found = request.find("outputs");
    if (found == request.end() || (found->is_array() && found->empty())) {
        for (std::size_t i = 0; i < names.size(); ++i) {
            wanted.push_back({i, binary});
        }
        return wanted;
    }
    if (!found->is_array()) {
        throw InferenceError("'outputs' is not a list");
    }
    for (const auto& output : *found) {
        const auto name = text_member(output, "name", "an output");
        const auto place = std::find(names.begin(), names.end(), name);
        if (place == names.end()) {
            std::string known;
            for (const auto& one : names) {
                known += (known.empty() ? "" : ", ") + std::string(one);
            }
            throw InferenceError("the model has no output " + quote(name) + "; it has " + known);
        }
        const auto index = static_cast<std::size_t>(place - names.begin());
        for (const auto& other : wanted) {
            if (other.index == index) {
                throw InferenceError("the output " + quote(name) + " is asked for twice");
            }
        }
        wanted.push_back({index, flag(parameters(output, "an output"), "binary_data", binary)});
    }
    return wanted;
}

std::size_t json_length(std::string_view header, std::size_t body) {
    if (header.empty()) {
        return body;
    }
    std::size_t length = 0;
    const auto [end, error] = std::from_chars(header.data(), header.data() + header.size(), length);
    if (error != std::errc() || end != header.data() + header.size() || length > body) {
        throw InferenceError(
            "Inference-Header-Content-Length is " + quote(header) + "; the body has " + std::to_string(body) +
            " bytes");
    }
    return length;
}

}  // namespace

std::vector<float> InferenceRequest::image(std::size_t index) const {
    std::vector<float> tensor(values_of_image);
    const auto size = values_of_image * sizeof(float);
    const auto* source = bytes.empty() ? reinterpret_cast<const char*>(values.data()) : bytes.data();
    std::memcpy(tensor.data(), source + index * size, size);
    return tensor;
}

std::uint64_t inference_memory(
    std::size_t body, std::string_view header_length, const InputSpec& input, const InferenceLimits& limits) {
    const auto length = json_length(header_length, body);
    const auto nodes = std::min(max_nodes + most_lists(input, limits.max_images), length);
    return most_numbers(length, input, limits.max_images) * sizeof(float) + nodes * node_bytes;
}

InferenceRequest parse_inference(
    std::string_view body, std::string_view header_length, const InputSpec& input,
    const std::vector<std::string_view>& outputs, const InferenceLimits& limits) {
    const auto max_images = limits.max_images;
    const auto length = json_length(header_length, body.size());
    const auto tensors = body.substr(length);
    Reader reader(most_numbers(length, input, max_images), most_lists(input, max_images), limits.wanted);
    const auto json = reader.read(body.substr(0, length));
    const auto& inputs = member(json, "inputs", "the request");
    if (!inputs.is_array() || inputs.size() != 1) {
        throw InferenceError("'inputs' is not a list of one input, " + quote(input.name));
    }
    InferenceRequest request;
    const bool as_files = takes_files(inputs[0]);
    request.images = check_input(inputs[0], input, max_images, as_files);
    request.outputs = wanted_outputs(json, outputs);
    request.values_of_image = input.preprocess.values();
    if (json.contains("id")) {
        request.id = text_member(json, "id", "the request");
    }
    const auto expected = request.images * request.values_of_image;
    const auto own = parameters(inputs[0], "the input");
    auto values = reader.take();
    if (as_files) {
        if (values || !own.contains("binary_data_size") || own["binary_data_size"] != tensors.size()) {
            throw InferenceError(
                "image files stand behind the JSON, with the parameter 'binary_data_size' of the input: here " +
                std::to_string(tensors.size()) + ", and not in its 'data'");
        }
        request.files = elements(tensors, request.images);
        return request;
    }
    if (own.contains("binary_data_size")) {
        if (values) {
            throw InferenceError("the input has both 'data' and 'binary_data_size'; send one of them");
        }
        const auto& size = own["binary_data_size"];
        if (size != expected * sizeof(float) || tensors.size() != expected * sizeof(float)) {
            throw InferenceError(
                "the input's binary_data_size is " + quote(size.dump(-1, ' ', false, Json::error_handler_t::replace)) +
                ", and " + std::to_string(tensors.size()) + " bytes stand behind the JSON; expected of both " +
                std::to_string(expected * sizeof(float)));
        }
        request.bytes = tensors;
        return request;
    }
    if (!tensors.empty()) {
        throw InferenceError(
            std::to_string(tensors.size()) + " bytes stand behind the JSON, and the input has no 'binary_data_size'");
    }
    if (!values) {
        throw InferenceError("the input has neither 'data' nor the parameter 'binary_data_size'");
    }
    if (values->size() != expected) {
        throw InferenceError(
            "the input's data has " + std::to_string(values->size()) + " numbers; its shape says " +
            std::to_string(expected));
    }
    request.values = std::move(*values);
    return request;
}

}  // namespace trtdet::serve
