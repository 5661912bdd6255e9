// A bundle: the folder that 'trtdet build' makes, with an engine and everything that is known about it.
//
// manifest.json is the contract between trtdet in Python and this library. Keys are added within a schema, never
// removed or given another meaning, so unknown keys are left alone and missing ones are an error. Schema 2 is schema 1
// with the key `parts`, of which no key may be unknown: it would be something that the network gives for each object.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "trtdet/errors.hpp"
#include "trtdet/export.hpp"

namespace trtdet {

enum class Resize { letterbox_topleft, letterbox_centre, stretch };
enum class Interpolation { nearest, linear, cubic, area };
enum class Color { rgb, bgr };

// How an image becomes the network's input: resize, reorder channels, then (x * scale - mean) / std for each channel.
struct Preprocess {
    int height = 0;  // of the network's input, in pixels
    int width = 0;
    Resize resize = Resize::letterbox_centre;
    Interpolation interpolation = Interpolation::linear;
    std::uint8_t pad_value = 114;  // grey level of the letterbox border, before scale and mean
    Color color = Color::rgb;      // order of the channels, of mean and of std
    double scale = 1;
    std::array<double, 3> mean{};
    std::array<double, 3> std{1, 1, 1};

    // Numbers in the network's input for one image: 3 channels of height x width.
    std::size_t values() const { return 3 * static_cast<std::size_t>(height) * static_cast<std::size_t>(width); }
};

// What suppresses overlapping boxes: something in the engine, or the reader of its outputs.
enum class Suppression { native, onnx, efficient, host };

struct Nms {
    Suppression where = Suppression::host;
    bool logits = false;          // with host: the engine's scores have no sigmoid yet
    float score_threshold = 0;    // a score must exceed it, 0 to 1
    float iou_threshold = 0;      // suppresses strictly above it, 0 to 1
    int max_detections = 0;       // of an image
    int pre_nms_topk = 0;         // at most so many candidates of an image enter, best first
    bool class_agnostic = false;  // boxes of all classes suppress each other
    bool best_class = false;      // a box is a candidate for its highest class only
};

enum class DType { float32, float16, int32, int64, int8, uint8, boolean };

// Bytes of one element.
TRTDET_API std::size_t size_of(DType dtype);

// An output of the engine. A dimension that is -1 is the batch.
struct OutputSpec {
    std::string name;
    DType dtype = DType::float32;
    std::vector<std::int64_t> shape;
};

// The input of the engine: float32, NCHW. The channels and the size are the same in all three.
struct InputSpec {
    std::string name;
    int min_batch = 1;
    int opt_batch = 1;  // what the engine was optimised for
    int max_batch = 1;
    Preprocess preprocess;
};

// Masks of a two-stage detector, which are pasted into the image outside of the network: masks.hpp.
struct MaskSpec {
    std::string output;      // float32 (batch, detections, size, size), 0 to 1, rows as those of the boxes
    int size = 0;            // of a mask, in values on each side
    float threshold = 0.5F;  // a pixel's probability must exceed it, 0 to 1
};

// Masks of a one-stage detector: one logit for each cell of the input is the sum of the prototypes, weighted by an
// object's coefficients. masks.hpp pastes them.
struct PrototypeSpec {
    std::string coefficients;  // output float32 (batch, rows, count), rows as those of the boxes
    std::string prototypes;    // output float32 (batch, count, height, width), over the whole input
    int count = 0;
    int height = 0;  // of the prototypes, in cells
    int width = 0;
    double threshold = 0.5;  // a pixel's probability must exceed it, between 0 and 1
};

// Keypoints of each object.
struct KeypointSpec {
    std::string output;  // float32 (batch, rows, names, 3): x and y in pixels of the input, and a score of 0 to 1
    std::vector<std::string> names;
    std::vector<double> sigmas;                 // tolerances in COCO's keypoint AP, one for each name
    std::vector<std::pair<int, int>> skeleton;  // which of them a picture joins by a line, by index
};

// Rotated boxes; the `boxes` beside them are their upright hulls.
struct RotatedBoxSpec {
    std::string output;  // float32 (batch, rows, 5), see RotatedBox
};

// What a one-stage detector gives beside boxes.
struct PartSpecs {
    std::optional<PrototypeSpec> masks;
    std::optional<KeypointSpec> keypoints;
    std::optional<RotatedBoxSpec> rotated_boxes;
};

// A library with TensorRT plugins.
struct Plugin {
    std::string file;  // in the bundle
    std::string sha256;
    bool embedded = false;  // the engine carries it; the file need not be loaded
};

// What the engine was built with, and what it runs on.
struct BackendSpec {
    std::string name;      // "tensorrt", "tensorrt-rtx" or "onnxruntime", which has no engine
    std::string version;   // of that library, such as "8.6.0"
    std::vector<int> sms;  // compute capabilities, 86 for 8.6
    std::vector<Plugin> plugins;
    bool version_compatible = false;   // later versions of the library run it as well
    bool hardware_compatible = false;  // so does every device from compute capability 8.0 on
    int dla = -1;                      // core of a DLA that runs a part of it; -1 for none
};

struct Manifest {
    std::string trtdet_version;
    std::string created;
    std::string model_name;
    std::vector<std::string> classes;  // names by class index
    InputSpec input;
    std::vector<OutputSpec> outputs;
    Nms nms;
    std::optional<MaskSpec> masks;  // of a two-stage detector
    PartSpecs parts;                // of a one-stage detector, schema 2
    BackendSpec backend;
    std::string portable;                      // the file that onnxruntime runs as it is; empty where there is none
    std::string float_model;                   // the file of the network in FP32, for onnxruntime; empty as above
    bool implicit = false;                     // INT8 is in the engine alone
    std::map<std::string, std::string> files;  // SHA-256 of every file of the bundle by name
    std::string content_hash;                  // equal where two bundles were made from the same things
};

// Reads a manifest.
//
// Throws BundleError: it is not JSON, has another schema, lacks a key, has one in `parts` that is not known, or a value
// is of the wrong type or out of range; the message names the key path. A file name that leaves the bundle's folder is
// out of range.
TRTDET_API Manifest parse_manifest(std::string_view json);

// A bundle on the disk, read and verified. Copies share nothing that changes: any thread may use any copy.
class TRTDET_API Bundle {
public:
    // Reads the manifest and compares every file with its SHA-256. Nothing of the bundle is loaded or run.
    //
    // public_key: a PEM file with the Ed25519 key that must have signed the bundle ('trtdet sign'); empty to ask for no
    // signature. The signature is compared first.
    //
    // Throws BundleError: there is no bundle, parse_manifest() throws, a file is missing or altered, the key cannot be
    // used, or it did not sign the bundle.
    static Bundle open(const std::filesystem::path& folder, const std::filesystem::path& public_key = {});

    const Manifest& manifest() const { return manifest_; }
    const std::filesystem::path& folder() const { return folder_; }

    // The absolute path of one of the bundle's files. Throws BundleError: it has no such file.
    std::filesystem::path file(const std::string& name) const;

    // The bytes of one of the bundle's files, whose SHA-256 is compared once more while they are read: what is returned
    // is what the manifest vouches for, even if the file was replaced since open().
    //
    // Throws BundleError: the bundle has no such file, or it was altered.
    std::vector<char> read(const std::string& name) const;

private:
    Bundle(std::filesystem::path folder, Manifest manifest);
    const std::string& hash_of(const std::string& name) const;
    void check(const std::string& name, const std::string& expected, const std::string& got) const;

    std::filesystem::path folder_;
    Manifest manifest_;
};

// The SHA-256 of a file as hexadecimal digits. Throws BundleError: it cannot be read.
TRTDET_API std::string sha256_file(const std::filesystem::path& file);

}  // namespace trtdet
