// Manifests, bundles and recordings for the tests, small enough to be read.
#pragma once

#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "trtdet/bundle.hpp"

namespace trtdet::tests {

using Json = nlohmann::json;

// A manifest of a network of 8 x 16 pixels, three boxes and two classes, suppressed by the host.
inline Json manifest_json() {
    return Json::parse(R"({
        "schema": 1,
        "trtdet_version": "0.1.0",
        "created": "2026-01-01T00:00:00+00:00",
        "model": {"sha256": "0", "name": "small", "classes": ["cat", "dog"]},
        "input": {
            "name": "images",
            "dtype": "float32",
            "shape": {"min": [1, 3, 8, 16], "opt": [2, 3, 8, 16], "max": [4, 3, 8, 16]},
            "preprocess": {
                "size": [8, 16], "name": null, "resize": "stretch", "interpolation": "linear", "pad_value": 114,
                "color": "rgb", "scale": 1.0, "mean": [0.0, 0.0, 0.0], "std": [1.0, 1.0, 1.0]
            }
        },
        "outputs": [
            {"name": "boxes", "dtype": "float32", "shape": ["batch", 3, 4]},
            {"name": "scores", "dtype": "float32", "shape": ["batch", 3, 2]}
        ],
        "nms": {
            "where": "host", "scores": "probabilities", "score_threshold": 0.1, "iou_threshold": 0.5, "max_detections": 3,
            "pre_nms_topk": 10, "class_agnostic": false, "candidates": "all-classes"
        },
        "backend": {"name": "tensorrt", "version": "10.9.0", "sms": [86], "plugins": []},
        "quantization": {"mode": "none"},
        "precision": {"int8": 0, "fp16": 0, "fp32": 1},
        "audit": null,
        "files": {},
        "command": {},
        "content_hash": "abc"
    })");
}

// The same of a network that suppresses by itself and gives masks of 2 x 2 values.
inline Json masks_manifest_json() {
    Json manifest = manifest_json();
    manifest["nms"]["where"] = "native";
    manifest["outputs"] = Json::parse(R"([
        {"name": "num_dets", "dtype": "int32", "shape": ["b", 1]},
        {"name": "boxes", "dtype": "float32", "shape": ["b", 3, 4]},
        {"name": "scores", "dtype": "float32", "shape": ["b", 3]},
        {"name": "classes", "dtype": "int32", "shape": ["b", 3]},
        {"name": "masks", "dtype": "float32", "shape": ["b", 3, 2, 2]}
    ])");
    manifest["masks"] = {{"output", "masks"}, {"size", 2}, {"threshold", 0.5}};
    return manifest;
}

// The same as manifest_json() with everything that a one-stage detector may give beside boxes: two prototypes of 2 x 4
// cells, two keypoints and rotated boxes.
inline Json parts_manifest_json() {
    Json manifest = manifest_json();
    manifest["schema"] = 2;
    for (const auto& [name, shape] : std::initializer_list<std::pair<const char*, Json>>{
             {"mask_coefficients", {"batch", 3, 2}},
             {"prototypes", {"batch", 2, 2, 4}},
             {"keypoints", {"batch", 3, 2, 3}},
             {"rotated_boxes", {"batch", 3, 5}}}) {
        manifest["outputs"].push_back({{"name", name}, {"dtype", "float32"}, {"shape", shape}});
    }
    manifest["parts"] = Json::parse(R"({
        "masks": {"coefficients": "mask_coefficients", "prototypes": "prototypes", "threshold": 0.5},
        "keypoints": {"output": "keypoints", "names": ["head", "tail"], "sigmas": [0.5, 0.25], "skeleton": [[0, 1]]},
        "rotated_boxes": {"output": "rotated_boxes"}
    })");
    return manifest;
}

// A folder that goes with the object.
class Folder {
public:
    Folder() {
        std::string name = (std::filesystem::temp_directory_path() / "trtdet-XXXXXX").string();
        if (::mkdtemp(name.data()) == nullptr) {
            throw std::runtime_error("no temporary folder can be made");
        }
        path_ = name;
    }
    ~Folder() { std::filesystem::remove_all(path_); }
    Folder(const Folder&) = delete;
    Folder& operator=(const Folder&) = delete;

    const std::filesystem::path& path() const { return path_; }

    std::filesystem::path write(const std::string& name, const std::string& text) const {
        std::ofstream(path_ / name, std::ios::binary) << text;
        return path_ / name;
    }

private:
    std::filesystem::path path_;
};

// Puts a bundle with these files into a folder.
inline void write_bundle(const Folder& folder, Json manifest, const std::map<std::string, std::string>& files) {
    for (const auto& [name, text] : files) {
        manifest["files"][name] = sha256_file(folder.write(name, text));
    }
    folder.write("manifest.json", manifest.dump());
}

// One image of a recording: the colour that it is filled with, and the outputs for it, in the order of the manifest.
struct Recorded {
    float grey;
    std::vector<std::string> outputs;  // bytes
};

template <typename T>
std::string bytes_of(const std::vector<T>& values) {
    return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

// The bytes of a recording of images that are of one colour.
inline std::string recording_of(
    const Json& manifest, const std::vector<Recorded>& images, const Json& changes = Json::object()) {
    const std::map<std::string, std::string> types = {{"float32", "F32"}, {"int32", "I32"}};
    const int rows = std::min(16, manifest["input"]["preprocess"]["size"][0].get<int>());
    const int columns = std::min(16, manifest["input"]["preprocess"]["size"][1].get<int>());
    Json header = {{"__metadata__", {{"format", "trtdet-recording-1"}, {"content_hash", manifest["content_hash"]}}}};
    std::string data;
    const auto add = [&](const std::string& name, const std::string& type, Json shape, const std::string& bytes) {
        shape[0] = images.size();
        header[name] = {{"dtype", type}, {"shape", shape}, {"data_offsets", {data.size(), data.size() + bytes.size()}}};
        data += bytes;
    };
    std::string prints;
    for (const Recorded& image : images) {
        prints += bytes_of(std::vector<float>(static_cast<std::size_t>(3 * rows * columns), image.grey));
    }
    add("fingerprints", "F32", {0, 3, rows, columns}, prints);
    for (std::size_t output = 0; output < manifest["outputs"].size(); ++output) {
        std::string all;
        for (const Recorded& image : images) {
            all += image.outputs.at(output);
        }
        const Json& spec = manifest["outputs"][output];
        add("outputs." + spec["name"].get<std::string>(), types.at(spec["dtype"]), spec["shape"], all);
    }
    header.merge_patch(changes);
    const std::string text = header.dump();
    std::string length;
    for (std::size_t shift = 0; shift < 64; shift += 8) {
        length += static_cast<char>(text.size() >> shift & 0xff);
    }
    return length + text + data;
}

}  // namespace trtdet::tests
