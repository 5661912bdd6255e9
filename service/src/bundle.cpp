#include "trtdet/bundle.hpp"

#include <openssl/evp.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "signature.hpp"
#include "text.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

using Json = nlohmann::json;

constexpr int plain_schema = 1;
constexpr int parts_schema = 2;  // with key 'parts'
constexpr const char* manifest_file = "manifest.json";

// Of a manifest in bytes: a hundred times what 'trtdet build' writes.
constexpr std::size_t most_manifest = std::size_t{16} << 20U;

// A side of the network's input above this is no detector's; it keeps every product of sizes far from overflow.
constexpr int largest_side = 1 << 16;

// Of a mask, in values on each side; those that there are have 28 or 56.
constexpr int largest_mask = 1024;

// Of an object's mask coefficients, and of its keypoints.
constexpr int most_prototypes = 4096;
constexpr int most_keypoints = 4096;

// A place in the manifest, which knows its key path.
class Value {
public:
    explicit Value(const Json& json, std::string path = "") : json_(json), path_(std::move(path)) {}

    [[noreturn]] void refuse(const std::string& what) const {
        throw BundleError(
            std::string(manifest_file) + (path_.empty() ? "" : ": key '" + path_ + "'") + " " + what +
            "; build the bundle again");
    }

    Value operator[](const char* key) const {
        const auto found = object().find(key);
        const std::string below = path_.empty() ? key : path_ + "." + key;
        if (found == json_.end()) {
            Value(json_, below).refuse("is missing");
        }
        return Value(*found, below);
    }

    // Refuses keys beside these.
    void only(std::initializer_list<const char*> allowed) const {
        for (const auto& [key, value] : object().items()) {
            std::string names;
            bool known = false;
            for (const char* const one : allowed) {
                known = known || key == one;
                names += (names.empty() ? "" : ", ") + std::string(one);
            }
            if (!known) {
                refuse("has the key " + in_quotes(key) + ", and this libtrtdet reads " + names);
            }
        }
    }

    std::optional<Value> find(const char* key) const {
        return object().contains(key) ? std::optional<Value>((*this)[key]) : std::nullopt;
    }

    std::string text() const {
        if (!json_.is_string()) {
            refuse(std::string("is a ") + json_.type_name() + ", expected a string");
        }
        return json_.get<std::string>();
    }

    bool boolean() const {
        if (!json_.is_boolean()) {
            refuse(std::string("is a ") + json_.type_name() + ", expected true or false");
        }
        return json_.get<bool>();
    }

    bool is_null() const { return json_.is_null(); }
    bool is_integer() const { return json_.is_number_integer(); }

    int integer(std::int64_t least, std::int64_t most) const {
        // Beyond the range of int64 a number is read as unsigned or as floating-point.
        const bool readable = json_.is_number_integer() &&
                              !(json_.is_number_unsigned() &&
                                json_.get<std::uint64_t>() > std::uint64_t{std::numeric_limits<std::int64_t>::max()});
        if (!readable || json_.get<std::int64_t>() < least || json_.get<std::int64_t>() > most) {
            refuse(
                "is " + shown() + ", expected an integer from " + std::to_string(least) + " to " +
                std::to_string(most));
        }
        return static_cast<int>(json_.get<std::int64_t>());
    }

    double number(double least, double most) const {
        if (!json_.is_number() || !(json_.get<double>() >= least && json_.get<double>() <= most)) {
            refuse("is " + shown() + ", expected a number from " + format_number(least) + " to " + format_number(most));
        }
        return json_.get<double>();
    }

    double positive() const {
        const double value = number(0, std::numeric_limits<double>::max());
        if (value == 0) {
            refuse("is 0, expected a number above it");
        }
        return value;
    }

    std::vector<Value> list() const {
        if (!json_.is_array()) {
            refuse(std::string("is a ") + json_.type_name() + ", expected a list");
        }
        std::vector<Value> values;
        for (std::size_t index = 0; index < json_.size(); ++index) {
            values.emplace_back(json_[index], path_ + "." + std::to_string(index));
        }
        return values;
    }

    std::vector<Value> list(std::size_t count) const {
        std::vector<Value> values = list();
        if (values.size() != count) {
            refuse("has " + std::to_string(values.size()) + " entries, expected " + std::to_string(count));
        }
        return values;
    }

    std::map<std::string, std::string> texts() const {
        std::map<std::string, std::string> found;
        for (const auto& [key, value] : object().items()) {
            found[key] = Value(value, path_ + "." + key).text();
        }
        return found;
    }

    template <typename T>
    T one_of(std::initializer_list<std::pair<const char*, T>> allowed) const {
        const std::string got = text();
        std::string names;
        for (const auto& [name, value] : allowed) {
            if (got == name) {
                return value;
            }
            names += (names.empty() ? "" : ", ") + std::string(name);
        }
        refuse("is " + in_quotes(got) + ", expected one of " + names);
    }

private:
    const Json& object() const {
        if (!json_.is_object()) {
            refuse(std::string("is a ") + json_.type_name() + ", expected an object");
        }
        return json_;
    }

    std::string shown() const {
        return json_.is_primitive() ? printable(json_.dump(-1, ' ', true, Json::error_handler_t::replace))
                                    : std::string("a ") + json_.type_name();
    }

    // A reference, not a pointer: what is read outlives its reader.
    const Json& json_;
    std::string path_;
};

// A name of a file of the bundle's own: no folder, and nothing that leaves it.
std::string checked_name(const Value& at, const std::string& name) {
    if (name.empty() || name == "." || name == ".." || name.find('/') != std::string::npos ||
        name.find('\0') != std::string::npos) {
        at.refuse("names " + in_quotes(name) + ", expected the name of a file in the bundle's folder");
    }
    return name;
}

// The file of the bundle that a key names; empty where there is none.
std::string file_at(const Value& root, const char* key, const std::map<std::string, std::string>& files) {
    const auto value = root.find(key);
    if (!value || value->is_null()) {
        return {};
    }
    const std::string name = checked_name(*value, value->text());
    if (files.count(name) == 0) {
        value->refuse("names " + in_quotes(name) + ", which 'files' does not have");
    }
    return name;
}

std::string checked_hash(const Value& at, const std::string& hash) {
    if (hash.size() != 64 || hash.find_first_not_of("0123456789abcdef") != std::string::npos) {
        at.refuse("holds " + in_quotes(hash) + ", expected 64 hexadecimal digits");
    }
    return hash;
}

DType dtype_at(const Value& value) {
    return value.one_of<DType>({
        {"float32", DType::float32},
        {"float16", DType::float16},
        {"int32", DType::int32},
        {"int64", DType::int64},
        {"int8", DType::int8},
        {"uint8", DType::uint8},
        {"bool", DType::boolean},
    });
}

Preprocess preprocess_at(const Value& value) {
    Preprocess found;
    const auto size = value["size"].list(2);
    found.height = size[0].integer(1, largest_side);
    found.width = size[1].integer(1, largest_side);
    found.resize = value["resize"].one_of<Resize>({
        {"letterbox-topleft", Resize::letterbox_topleft},
        {"letterbox-centre", Resize::letterbox_centre},
        {"stretch", Resize::stretch},
    });
    found.interpolation = value["interpolation"].one_of<Interpolation>({
        {"nearest", Interpolation::nearest},
        {"linear", Interpolation::linear},
        {"cubic", Interpolation::cubic},
        {"area", Interpolation::area},
    });
    found.pad_value = static_cast<std::uint8_t>(value["pad_value"].integer(0, 255));
    found.color = value["color"].one_of<Color>({{"rgb", Color::rgb}, {"bgr", Color::bgr}});
    found.scale = value["scale"].positive();
    const double largest = std::numeric_limits<double>::max();
    const auto mean = value["mean"].list(3);
    const auto std = value["std"].list(3);
    for (std::size_t channel = 0; channel < 3; ++channel) {
        found.mean[channel] = mean[channel].number(-largest, largest);
        found.std[channel] = std[channel].positive();
    }
    return found;
}

InputSpec input_at(const Value& value) {
    InputSpec found;
    found.name = value["name"].text();
    found.preprocess = preprocess_at(value["preprocess"]);
    value["dtype"].one_of<DType>({{"float32", DType::float32}});
    int* const batches[] = {&found.min_batch, &found.opt_batch, &found.max_batch};
    const char* const kinds[] = {"min", "opt", "max"};
    int least = 1;
    for (int kind = 0; kind < 3; ++kind) {
        const auto shape = value["shape"][kinds[kind]].list(4);
        least = *batches[kind] = shape[0].integer(least, 1 << 16);
        const int sizes[] = {3, found.preprocess.height, found.preprocess.width};
        for (std::size_t axis = 0; axis < 3; ++axis) {
            shape[axis + 1].integer(sizes[axis], sizes[axis]);
        }
    }
    return found;
}

OutputSpec output_at(const Value& value) {
    OutputSpec found;
    found.name = value["name"].text();
    found.dtype = dtype_at(value["dtype"]);
    const auto shape = value["shape"].list();
    if (shape.empty() || shape.size() > 8) {
        value["shape"].refuse("has " + std::to_string(shape.size()) + " dimensions, expected 1 to 8");
    }
    std::int64_t elements = 1;
    for (std::size_t axis = 0; axis < shape.size(); ++axis) {
        // The batch is a number where it is fixed and a name where it is not.
        if (axis == 0 && !shape[0].is_integer()) {
            shape[0].text();
        }
        const std::int64_t size = axis == 0 ? -1 : shape[axis].integer(1, std::int64_t{1} << 30);
        found.shape.push_back(size);
        elements *= axis == 0 ? 1 : size;
        if (elements > std::int64_t{1} << 30) {
            value["shape"].refuse("has more than 2^30 elements an image");
        }
    }
    return found;
}

Nms nms_at(const Value& value) {
    Nms found;
    found.where = value["where"].one_of<Suppression>({
        {"native", Suppression::native},
        {"onnx", Suppression::onnx},
        {"efficient", Suppression::efficient},
        {"host", Suppression::host},
    });
    // The first bundles had probabilities only.
    if (const auto scores = value.find("scores")) {
        found.logits = scores->one_of<bool>({{"probabilities", false}, {"logits", true}});
    }
    found.score_threshold = static_cast<float>(value["score_threshold"].number(0, 1));
    found.iou_threshold = static_cast<float>(value["iou_threshold"].number(0, 1));
    found.max_detections = value["max_detections"].integer(1, 1 << 20);
    found.pre_nms_topk = value["pre_nms_topk"].integer(1, 1 << 30);
    found.class_agnostic = value["class_agnostic"].boolean();
    found.best_class = value["candidates"].one_of<bool>({{"all-classes", false}, {"best-class", true}});
    return found;
}

// The shape of an output float32 of so many dimensions that a key names.
const std::vector<std::int64_t>& shape_of_named(
    const Value& at, const Manifest& manifest, std::size_t rank, const std::string& expected) {
    const std::string name = at.text();
    const auto output = std::find_if(
        manifest.outputs.begin(), manifest.outputs.end(), [&](const OutputSpec& one) { return one.name == name; });
    if (output == manifest.outputs.end()) {
        at.refuse("names " + in_quotes(name) + ", which 'outputs' does not have");
    }
    if (output->dtype != DType::float32 || output->shape.size() != rank) {
        at.refuse("names " + in_quotes(name) + ", which is not float32 " + expected);
    }
    return output->shape;
}

// The output of masks must be what boxes are read with: a row for each detection that is left.
MaskSpec masks_at(const Value& value, const Manifest& manifest) {
    MaskSpec found;
    found.output = value["output"].text();
    found.size = value["size"].integer(1, largest_mask);
    found.threshold = static_cast<float>(value["threshold"].number(0, 1));
    if (manifest.nms.where == Suppression::host) {
        value.refuse("stands beside 'nms.where', which is host: masks are those of detections, not of candidates");
    }
    const std::string expected =
        "(batch, detections, " + std::to_string(found.size) + ", " + std::to_string(found.size) + ")";
    const auto& shape = shape_of_named(value["output"], manifest, 4, expected);
    if (shape[2] != found.size || shape[3] != found.size) {
        value["output"].refuse("names " + in_quotes(found.output) + ", which is not float32 " + expected);
    }
    return found;
}

PrototypeSpec prototypes_at(const Value& value, const Manifest& manifest) {
    value.only({"coefficients", "prototypes", "threshold"});
    PrototypeSpec found;
    found.coefficients = value["coefficients"].text();
    found.prototypes = value["prototypes"].text();
    found.threshold = value["threshold"].number(0, 1);
    if (found.threshold <= 0 || found.threshold >= 1) {
        value["threshold"].refuse("is " + format_number(found.threshold) + ", expected a number between 0 and 1");
    }
    const auto& rows = shape_of_named(value["coefficients"], manifest, 3, "(batch, rows, coefficients)");
    const auto& cells = shape_of_named(value["prototypes"], manifest, 4, "(batch, coefficients, height, width)");
    if (rows[2] != cells[1] || rows[2] > most_prototypes || std::max(cells[2], cells[3]) > largest_side) {
        value.refuse(
            "names outputs of " + std::to_string(rows[2]) + " coefficients and " + std::to_string(cells[1]) +
            " prototypes of " + std::to_string(cells[2]) + " x " + std::to_string(cells[3]) +
            " cells, expected as many of both, at most " + std::to_string(most_prototypes) + ", of sides up to " +
            std::to_string(largest_side));
    }
    found.count = static_cast<int>(cells[1]);
    found.height = static_cast<int>(cells[2]);
    found.width = static_cast<int>(cells[3]);
    return found;
}

KeypointSpec keypoints_at(const Value& value, const Manifest& manifest) {
    value.only({"output", "names", "sigmas", "skeleton"});
    KeypointSpec found;
    found.output = value["output"].text();
    for (const Value& name : value["names"].list()) {
        found.names.push_back(name.text());
    }
    const std::size_t count = found.names.size();
    if (count < 1 || count > most_keypoints) {
        value["names"].refuse(
            "has " + std::to_string(count) + " entries, expected 1 to " + std::to_string(most_keypoints));
    }
    for (const Value& sigma : value["sigmas"].list(count)) {
        found.sigmas.push_back(sigma.positive());
    }
    const auto skeleton = value.find("skeleton");
    for (const Value& pair : skeleton ? skeleton->list() : std::vector<Value>()) {
        const auto ends = pair.list(2);
        const int last = static_cast<int>(count) - 1;
        found.skeleton.emplace_back(ends[0].integer(0, last), ends[1].integer(0, last));
    }
    const std::string expected = "(batch, rows, " + std::to_string(count) + ", 3)";
    const auto& shape = shape_of_named(value["output"], manifest, 4, expected);
    if (shape[2] != static_cast<std::int64_t>(count) || shape[3] != 3) {
        value["output"].refuse("names " + in_quotes(found.output) + ", which is not float32 " + expected);
    }
    return found;
}

RotatedBoxSpec rotated_boxes_at(const Value& value, const Manifest& manifest) {
    value.only({"output"});
    RotatedBoxSpec found;
    found.output = value["output"].text();
    if (shape_of_named(value["output"], manifest, 3, "(batch, rows, 5)")[2] != 5) {
        value["output"].refuse("names " + in_quotes(found.output) + ", which is not float32 (batch, rows, 5)");
    }
    return found;
}

PartSpecs parts_at(const Value& value, const Manifest& manifest) {
    value.only({"masks", "keypoints", "rotated_boxes"});
    PartSpecs found;
    if (const auto masks = value.find("masks"); masks && !masks->is_null()) {
        found.masks = prototypes_at(*masks, manifest);
    }
    if (const auto keypoints = value.find("keypoints"); keypoints && !keypoints->is_null()) {
        found.keypoints = keypoints_at(*keypoints, manifest);
    }
    if (const auto rotated = value.find("rotated_boxes"); rotated && !rotated->is_null()) {
        found.rotated_boxes = rotated_boxes_at(*rotated, manifest);
    }
    if (!found.masks && !found.keypoints && !found.rotated_boxes) {
        value.refuse("has none of masks, keypoints and rotated_boxes");
    }
    if (manifest.masks) {
        value.refuse("stands beside 'masks': those are of two-stage detectors, parts of one-stage detectors");
    }
    return found;
}

BackendSpec backend_at(const Value& value, const std::map<std::string, std::string>& files) {
    BackendSpec found;
    found.name = value["name"].text();
    found.version = value["version"].text();
    for (const Value& sm : value["sms"].list()) {
        found.sms.push_back(sm.integer(1, 9999));
    }
    for (const Value& part : value["plugins"].list()) {
        Plugin plugin;
        plugin.file = checked_name(part["file"], part["file"].text());
        plugin.sha256 = checked_hash(part["sha256"], part["sha256"].text());
        if (const auto embedded = part.find("embedded")) {
            plugin.embedded = embedded->boolean();
        }
        const auto listed = files.find(plugin.file);
        if (listed == files.end() || listed->second != plugin.sha256) {
            part["sha256"].refuse("is not what 'files' has for " + in_quotes(plugin.file));
        }
        found.plugins.push_back(std::move(plugin));
    }
    if (const auto compatible = value.find("version_compatible")) {
        found.version_compatible = compatible->boolean();
    }
    if (const auto compatible = value.find("hardware_compatible")) {
        found.hardware_compatible = compatible->boolean();
    }
    if (const auto core = value.find("dla"); core && !core->is_null()) {
        found.dla = core->integer(0, 1);
    }
    return found;
}

class Sha256 {
public:
    Sha256() : context_(EVP_MD_CTX_new(), EVP_MD_CTX_free) {
        if (!context_ || EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) != 1) {
            throw std::bad_alloc();
        }
    }

    void update(const char* data, std::size_t size) { EVP_DigestUpdate(context_.get(), data, size); }

    std::string digits() {
        unsigned char digest[EVP_MAX_MD_SIZE];
        unsigned int size = 0;
        EVP_DigestFinal_ex(context_.get(), digest, &size);
        std::string found;
        for (unsigned int index = 0; index < size; ++index) {
            found += "0123456789abcdef"[digest[index] >> 4];
            found += "0123456789abcdef"[digest[index] & 15];
        }
        return found;
    }

private:
    std::unique_ptr<EVP_MD_CTX, void (*)(EVP_MD_CTX*)> context_;
};

// Reads a file in pieces. False where it cannot be read.
template <typename Sink>
bool read_pieces(const std::filesystem::path& file, Sink&& sink) {
    std::error_code error;
    if (!std::filesystem::is_regular_file(file, error)) {
        return false;
    }
    std::ifstream stream(file, std::ios::binary);
    std::vector<char> piece(1 << 20);
    while (stream.read(piece.data(), static_cast<std::streamsize>(piece.size())) || stream.gcount() > 0) {
        sink(piece.data(), static_cast<std::size_t>(stream.gcount()));
    }
    return stream.eof() && !stream.bad();
}

}  // namespace

std::size_t size_of(DType dtype) {
    switch (dtype) {
        case DType::float32:
        case DType::int32:
            return 4;
        case DType::float16:
            return 2;
        case DType::int64:
            return 8;
        case DType::int8:
        case DType::uint8:
        case DType::boolean:
            return 1;
    }
    return 0;
}

Manifest parse_manifest(std::string_view json) {
    const Json data = Json::parse(json, nullptr, false);
    const Value root(data);
    if (data.is_discarded()) {
        root.refuse("is not JSON");
    }
    const int schema = root["schema"].integer(std::numeric_limits<int>::min(), std::numeric_limits<int>::max());
    if (schema != plain_schema && schema != parts_schema) {
        root["schema"].refuse("is " + std::to_string(schema) + ", and this libtrtdet reads 1 and 2");
    }
    Manifest found;
    found.trtdet_version = root["trtdet_version"].text();
    found.created = root["created"].text();
    found.model_name = root["model"]["name"].text();
    for (const Value& name : root["model"]["classes"].list()) {
        found.classes.push_back(name.text());
    }
    found.input = input_at(root["input"]);
    for (const Value& output : root["outputs"].list()) {
        found.outputs.push_back(output_at(output));
    }
    found.nms = nms_at(root["nms"]);
    if (const auto masks = root.find("masks"); masks && !masks->is_null()) {
        found.masks = masks_at(*masks, found);
    }
    if (schema == parts_schema) {
        found.parts = parts_at(root["parts"], found);
    } else if (const auto parts = root.find("parts"); parts && !parts->is_null()) {
        parts->refuse("belongs to schema 2, and 'schema' is 1");
    }
    for (const auto& [name, hash] : root["files"].texts()) {
        found.files[checked_name(root["files"], name)] = checked_hash(root["files"], hash);
    }
    found.backend = backend_at(root["backend"], found.files);
    found.implicit = root["quantization"]["mode"].text() == "implicit";
    // The first bundles name none.
    found.portable = file_at(root, "portable", found.files);
    found.float_model = file_at(root, "float_model", found.files);
    found.content_hash = root["content_hash"].text();
    return found;
}

Bundle Bundle::open(const std::filesystem::path& folder, const std::filesystem::path& public_key) {
    std::string text;
    const auto take = [&](const char* data, std::size_t size) {
        if (text.size() + size > most_manifest) {
            throw BundleError(
                "bundle " + in_quotes(folder.string()) + ": " + manifest_file + " has more than " +
                std::to_string(most_manifest) + " bytes; make the bundle again with 'trtdet build'");
        }
        text.append(data, size);
    };
    if (!read_pieces(folder / manifest_file, take)) {
        throw BundleError(
            in_quotes(folder.string()) + " is not a bundle: it has no " + manifest_file +
            " that can be read; make one with 'trtdet build'");
    }
    try {
        if (!public_key.empty()) {  // before anything of it is believed
            check_signature(folder, text, public_key);
        }
        Bundle bundle(std::filesystem::absolute(folder), parse_manifest(text));
        for (const auto& [name, expected] : bundle.manifest_.files) {
            bundle.check(name, expected, sha256_file(bundle.folder_ / name));
        }
        return bundle;
    } catch (const BundleError& error) {
        throw BundleError("bundle " + in_quotes(folder.string()) + ": " + error.what());
    }
}

Bundle::Bundle(std::filesystem::path folder, Manifest manifest)
    : folder_(std::move(folder)), manifest_(std::move(manifest)) {}

std::filesystem::path Bundle::file(const std::string& name) const {
    hash_of(name);
    return folder_ / name;
}

std::vector<char> Bundle::read(const std::string& name) const {
    const std::string& expected = hash_of(name);
    std::vector<char> bytes;
    Sha256 hash;
    const bool whole = read_pieces(folder_ / name, [&](const char* data, std::size_t size) {
        bytes.insert(bytes.end(), data, data + size);
        hash.update(data, size);
    });
    if (!whole) {
        throw BundleError(in_quotes((folder_ / name).string()) + " cannot be read; build the bundle again");
    }
    check(name, expected, hash.digits());
    return bytes;
}

const std::string& Bundle::hash_of(const std::string& name) const {
    const auto found = manifest_.files.find(name);
    if (found != manifest_.files.end()) {
        return found->second;
    }
    std::string names;
    for (const auto& entry : manifest_.files) {
        names += (names.empty() ? "" : ", ") + entry.first;
    }
    throw BundleError("bundle " + in_quotes(folder_.string()) + " has no " + in_quotes(name) + "; it holds " + names);
}

void Bundle::check(const std::string& name, const std::string& expected, const std::string& got) const {
    if (got != expected) {
        throw BundleError(
            in_quotes(name) + " was altered: sha256 " + got.substr(0, 12) + "... where the manifest says " +
            expected.substr(0, 12) + "...; build the bundle again");
    }
}

std::string sha256_file(const std::filesystem::path& file) {
    Sha256 hash;
    if (!read_pieces(file, [&](const char* data, std::size_t size) { hash.update(data, size); })) {
        throw BundleError(in_quotes(file.string()) + " cannot be read; build the bundle again");
    }
    return hash.digits();
}

}  // namespace trtdet
