// Bounding-box parser for DeepStream's Gst-nvinfer: trtdet's outputs to NvDsInferObjectDetectionInfo.
//
// A network that suppresses gives, per frame, num_dets INT32 (1), boxes FLOAT (K, 4), scores FLOAT (K) and classes
// INT32 (K). One that leaves suppression to its reader gives boxes FLOAT (N, 4), scores FLOAT (N, C) and, where those
// are to be compared, rotated_boxes FLOAT (N, 5); libtrtdet's suppression does it, with the rules of
// nvdsinfer_trtdet_config.h, so cluster-mode must be 4 (none). Boxes are x1 y1 x2 y2 in pixels of the network's input,
// which is what nvinfer maps back to the frame; those of rotated boxes are their hulls.
//
// The plugin itself drops what is under pre-cluster-threshold; raising that never changes which of the others are kept,
// as no box is suppressed by one with a lower score.
//
// NvDsInferParseTrtdet has no state and may be called from any thread. It throws nothing: what it cannot read is said
// on standard error and answered with false, at which nvinfer stops.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "nvdsinfer_custom_impl.h"
#include "nvdsinfer_trtdet_config.h"
#include "trtdet/detections.hpp"

extern "C" bool NvDsInferParseTrtdet(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferNetworkInfo& network,
    const NvDsInferParseDetectionParams& params, std::vector<NvDsInferObjectDetectionInfo>& objects);

namespace trtdet::deepstream {
namespace {

struct Tensor {
    const NvDsInferLayerInfo* layer;

    std::size_t rank() const { return layer->inferDims.numDims; }
    std::size_t size(std::size_t axis) const { return layer->inferDims.d[axis]; }
    template <typename Number>
    const Number* data() const {
        return static_cast<const Number*>(layer->buffer);
    }
};

bool said(const std::string& what) {
    std::cerr << "NvDsInferParseTrtdet: " << what << '\n';
    return false;
}

std::string shape_of(const Tensor& tensor) {
    std::string text;
    for (std::size_t axis = 0; axis < tensor.rank(); ++axis) {
        text += (axis == 0 ? "" : ", ") + std::to_string(tensor.size(axis));
    }
    return "(" + text + ")";
}

const NvDsInferLayerInfo* find(const std::vector<NvDsInferLayerInfo>& layers, const char* name) {
    const auto found = std::find_if(layers.begin(), layers.end(), [name](const NvDsInferLayerInfo& layer) {
        return layer.layerName != nullptr && std::strcmp(layer.layerName, name) == 0;
    });
    return found == layers.end() ? nullptr : &*found;
}

// Whether a layer is there with that type and rank; says what is wrong where it is not.
bool take(
    const std::vector<NvDsInferLayerInfo>& layers, const char* name, NvDsInferDataType type, std::size_t rank,
    Tensor& tensor) {
    tensor.layer = find(layers, name);
    if (tensor.layer == nullptr || tensor.layer->buffer == nullptr) {
        return said(
            "no output '" + std::string(name) + "'; output-blob-names must list what 'trtdet package' wrote there");
    }
    if (tensor.layer->dataType != type || tensor.rank() != rank) {
        return said(
            "output '" + std::string(name) + "' has type " + std::to_string(tensor.layer->dataType) + " and shape " +
            shape_of(tensor) + ", expected type " + std::to_string(type) + " and " + std::to_string(rank) +
            " dimensions; is the engine the one that was packaged?");
    }
    return true;
}

Box box_at(const float* boxes, std::size_t index) {
    const float* corners = boxes + 4 * index;
    return {corners[0], corners[1], corners[2], corners[3]};
}

// Adds an object. What nvinfer cannot place is left out: boxes that are not finite or, within the network's input, have
// no area. Value-initialised, as later releases of DeepStream have more fields.
void add(
    const Box& box, std::size_t label, float score, const NvDsInferNetworkInfo& network,
    std::vector<NvDsInferObjectDetectionInfo>& objects) {
    if (!std::isfinite(box.x1) || !std::isfinite(box.y1) || !std::isfinite(box.x2) || !std::isfinite(box.y2)) {
        return;
    }
    const float width = static_cast<float>(network.width);
    const float height = static_cast<float>(network.height);
    NvDsInferObjectDetectionInfo object{};
    object.classId = static_cast<unsigned int>(label);
    object.left = std::clamp(box.x1, 0.0F, width);
    object.top = std::clamp(box.y1, 0.0F, height);
    object.width = std::clamp(box.x2, 0.0F, width) - object.left;
    object.height = std::clamp(box.y2, 0.0F, height) - object.top;
    object.detectionConfidence = score;
    if (object.width > 0.0F && object.height > 0.0F) {
        objects.push_back(object);
    }
}

bool parse_raw(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferNetworkInfo& network,
    const NvDsInferParseDetectionParams& params, std::vector<NvDsInferObjectDetectionInfo>& objects) {
    Tensor boxes{};
    Tensor scores{};
    if (!take(layers, "boxes", FLOAT, 2, boxes) || !take(layers, "scores", FLOAT, 2, scores)) {
        return false;
    }
    const std::size_t count = boxes.size(0);
    const std::size_t classes = scores.size(1);
    if (boxes.size(1) != 4 || scores.size(0) != count || classes != params.numClassesConfigured) {
        return said(
            "boxes " + shape_of(boxes) + " and scores " + shape_of(scores) + " with num-detected-classes=" +
            std::to_string(params.numClassesConfigured) + ", expected (N, 4) and (N, num-detected-classes)");
    }
    Tensor rotated{};
    const bool is_rotated = find(layers, "rotated_boxes") != nullptr;
    if (is_rotated && !take(layers, "rotated_boxes", FLOAT, 2, rotated)) {
        return false;
    }
    if (is_rotated && (rotated.size(0) != count || rotated.size(1) != 5)) {
        return said("rotated_boxes " + shape_of(rotated) + " with boxes " + shape_of(boxes) + ", expected (N, 5)");
    }
    const std::vector<Detection> found = non_max_suppression(
        boxes.data<float>(), scores.data<float>(), count, classes, rules(),
        is_rotated ? rotated.data<float>() : nullptr);
    for (const Detection& one : found) {
        add(one.box, static_cast<std::size_t>(one.class_index), one.score, network, objects);
    }
    return true;
}

bool parse_suppressed(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferNetworkInfo& network,
    const NvDsInferParseDetectionParams& params, std::vector<NvDsInferObjectDetectionInfo>& objects) {
    Tensor num_dets{};
    Tensor boxes{};
    Tensor scores{};
    Tensor classes{};
    if (!take(layers, "num_dets", INT32, 1, num_dets) || !take(layers, "boxes", FLOAT, 2, boxes) ||
        !take(layers, "scores", FLOAT, 1, scores) || !take(layers, "classes", INT32, 1, classes)) {
        return false;
    }
    const std::size_t room = scores.size(0);
    if (num_dets.size(0) != 1 || boxes.size(0) != room || boxes.size(1) != 4 || classes.size(0) != room) {
        return said(
            "num_dets " + shape_of(num_dets) + ", boxes " + shape_of(boxes) + ", scores " + shape_of(scores) +
            " and classes " + shape_of(classes) + ", expected (1), (K, 4), (K) and (K)");
    }
    const std::int32_t given = num_dets.data<std::int32_t>()[0];
    if (given < 0 || static_cast<std::size_t>(given) > room) {
        return said("num_dets is " + std::to_string(given) + ", expected 0 to " + std::to_string(room));
    }
    for (std::size_t i = 0; i < static_cast<std::size_t>(given); ++i) {
        const std::int32_t label = classes.data<std::int32_t>()[i];
        const float score = scores.data<float>()[i];
        if (label < 0 || static_cast<unsigned int>(label) >= params.numClassesConfigured) {
            return said(
                "class " + std::to_string(label) + " with num-detected-classes=" +
                std::to_string(params.numClassesConfigured) + "; the configuration is not this network's");
        }
        // EfficientNMS_TRT counts pairs under its threshold as well where that is under 0.007; their score is -32768.
        if (score >= 0.0F) {
            add(box_at(boxes.data<float>(), i), static_cast<std::size_t>(label), score, network, objects);
        }
    }
    return true;
}

}  // namespace
}  // namespace trtdet::deepstream

// Parses one frame.
//
//   layers   the outputs, without the batch dimension, buffers in host memory
//   network  width and height of the network's input in pixels
//   params   the number of classes; thresholds are applied by nvinfer itself
//   objects  gets the detections added, best first: left, top, width and height in pixels of the network's input,
//            clipped to it, and a probability
//
// Returns false where the outputs are not trtdet's.
extern "C" bool NvDsInferParseTrtdet(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferNetworkInfo& network,
    const NvDsInferParseDetectionParams& params, std::vector<NvDsInferObjectDetectionInfo>& objects) {
    using namespace trtdet::deepstream;
    try {
        return find(layers, "num_dets") != nullptr ? parse_suppressed(layers, network, params, objects)
                                                   : parse_raw(layers, network, params, objects);
    } catch (const std::exception& error) {
        return said(error.what());
    }
}

CHECK_CUSTOM_PARSE_FUNC_PROTOTYPE(NvDsInferParseTrtdet)
