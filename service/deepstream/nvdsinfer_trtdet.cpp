// Parsers for DeepStream's Gst-nvinfer: trtdet's outputs to NvDsInferObjectDetectionInfo or, with masks, to
// NvDsInferInstanceMaskInfo.
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
// Masks are computed of mask_coefficients FLOAT (K or N, M), a row for each box, and prototypes FLOAT (M, h, w), cells
// over the whole input.
//
// The parsers have no state and may be called from any thread. They throw nothing: what they cannot read is said on
// standard error and answered with false, at which nvinfer stops.

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

extern "C" bool NvDsInferParseTrtdetMasks(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferNetworkInfo& network,
    const NvDsInferParseDetectionParams& params, std::vector<NvDsInferInstanceMaskInfo>& objects);

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

// What nvinfer can place of a detection: clipped to the network's input; false for boxes that are not finite or have no
// area there. Value-initialised, as later releases of DeepStream have more fields.
template <typename Object>
bool placed(const Detection& one, const NvDsInferNetworkInfo& network, Object& object) {
    const Box& box = one.box;
    if (!std::isfinite(box.x1) || !std::isfinite(box.y1) || !std::isfinite(box.x2) || !std::isfinite(box.y2)) {
        return false;
    }
    const float width = static_cast<float>(network.width);
    const float height = static_cast<float>(network.height);
    object = Object{};
    object.classId = static_cast<unsigned int>(one.class_index);
    object.left = std::clamp(box.x1, 0.0F, width);
    object.top = std::clamp(box.y1, 0.0F, height);
    object.width = std::clamp(box.x2, 0.0F, width) - object.left;
    object.height = std::clamp(box.y2, 0.0F, height) - object.top;
    object.detectionConfidence = one.score;
    return object.width > 0.0F && object.height > 0.0F;
}

bool parse_raw(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferParseDetectionParams& params,
    std::vector<Detection>& found) {
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
    found = non_max_suppression(
        boxes.data<float>(), scores.data<float>(), count, classes, rules(),
        is_rotated ? rotated.data<float>() : nullptr);
    return true;
}

bool parse_suppressed(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferParseDetectionParams& params,
    std::vector<Detection>& found) {
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
            found.push_back({box_at(boxes.data<float>(), i), score, label, i});
        }
    }
    return true;
}

// The detections of a frame, best first.
bool parse(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferParseDetectionParams& params,
    std::vector<Detection>& found) {
    return find(layers, "num_dets") != nullptr ? parse_suppressed(layers, params, found)
                                               : parse_raw(layers, params, found);
}

// A place on one axis between two cells.
struct Place {
    std::size_t first;
    std::size_t second;
    float share;  // of the second, 0 to 1
};

// Where the centre of a part of a side lies.
//
//   from, length  the side in pixels of the network's input
//   index, parts  which of how many equal parts
//   cells         of the axis, over `input` pixels
Place place_of(float from, float length, std::size_t index, std::size_t parts, std::size_t cells, float input) {
    const float pixel = from + (static_cast<float>(index) + 0.5F) * length / static_cast<float>(parts);
    const float most = static_cast<float>(cells - 1);
    const float at = std::clamp(pixel * static_cast<float>(cells) / input - 0.5F, 0.0F, most);
    const auto first = static_cast<std::size_t>(at);
    return {first, std::min(first + 1, cells - 1), at - static_cast<float>(first)};
}

// The cells that a side covers, at least 1.
std::size_t parts_of(float length, std::size_t cells, float input) {
    const float covered = std::ceil(length * static_cast<float>(cells) / input);
    return std::clamp<std::size_t>(static_cast<std::size_t>(covered), 1, cells);
}

struct Masks {
    Tensor coefficients;
    Tensor prototypes;

    bool take_from(const std::vector<NvDsInferLayerInfo>& layers) {
        if (!take(layers, "mask_coefficients", FLOAT, 2, coefficients) ||
            !take(layers, "prototypes", FLOAT, 3, prototypes)) {
            return false;
        }
        if (coefficients.size(1) != prototypes.size(0) || prototypes.size(1) == 0 || prototypes.size(2) == 0) {
            return said(
                "mask_coefficients " + shape_of(coefficients) + " and prototypes " + shape_of(prototypes) +
                ", expected (K, M) and (M, h, w)");
        }
        return true;
    }

    // Gives an object, whose box is set, its mask: probabilities on a grid over the box, about a value for each cell,
    // bilinear between the logits of the cells. nvinfer stretches it over the box, compares it with
    // segmentation-threshold and frees it.
    void give(std::size_t row, const NvDsInferNetworkInfo& network, NvDsInferInstanceMaskInfo& object) const {
        const std::size_t lines = prototypes.size(1);
        const std::size_t columns = prototypes.size(2);
        const auto input_width = static_cast<float>(network.width);
        const auto input_height = static_cast<float>(network.height);
        const std::vector<float> logits = logits_of(row);
        const std::size_t width = parts_of(object.width, columns, input_width);
        const std::size_t height = parts_of(object.height, lines, input_height);
        object.mask = new float[width * height];
        object.mask_width = static_cast<unsigned int>(width);
        object.mask_height = static_cast<unsigned int>(height);
        object.mask_size = static_cast<unsigned int>(sizeof(float) * width * height);
        for (std::size_t y = 0; y < height; ++y) {
            const Place down = place_of(object.top, object.height, y, height, lines, input_height);
            const float* const upper = logits.data() + down.first * columns;
            const float* const lower = logits.data() + down.second * columns;
            for (std::size_t x = 0; x < width; ++x) {
                const Place across = place_of(object.left, object.width, x, width, columns, input_width);
                const auto between = [&across](const float* line) {
                    return line[across.first] * (1 - across.share) + line[across.second] * across.share;
                };
                const float logit = between(upper) * (1 - down.share) + between(lower) * down.share;
                object.mask[y * width + x] = 1 / (1 + std::exp(-logit));
            }
        }
    }

private:
    std::vector<float> logits_of(std::size_t row) const {
        const std::size_t cells = prototypes.size(1) * prototypes.size(2);
        const std::size_t count = prototypes.size(0);
        std::vector<float> logits(cells);
        for (std::size_t one = 0; one < count; ++one) {
            const float weight = coefficients.data<float>()[row * count + one];
            const float* const prototype = prototypes.data<float>() + one * cells;
            for (std::size_t cell = 0; cell < cells; ++cell) {
                logits[cell] += weight * prototype[cell];
            }
        }
        return logits;
    }
};

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
        std::vector<trtdet::Detection> found;
        if (!parse(layers, params, found)) {
            return false;
        }
        NvDsInferObjectDetectionInfo object;
        for (const trtdet::Detection& one : found) {
            if (placed(one, network, object)) {
                objects.push_back(object);
            }
        }
        return true;
    } catch (const std::exception& error) {
        return said(error.what());
    }
}

// As NvDsInferParseTrtdet, each object with its mask.
extern "C" bool NvDsInferParseTrtdetMasks(
    const std::vector<NvDsInferLayerInfo>& layers, const NvDsInferNetworkInfo& network,
    const NvDsInferParseDetectionParams& params, std::vector<NvDsInferInstanceMaskInfo>& objects) {
    using namespace trtdet::deepstream;
    try {
        std::vector<trtdet::Detection> found;
        Masks masks{};
        if (!parse(layers, params, found) || !masks.take_from(layers)) {
            return false;
        }
        objects.reserve(objects.size() + found.size());  // so that nothing throws while a mask has no owner
        NvDsInferInstanceMaskInfo object;
        for (const trtdet::Detection& one : found) {
            if (one.row >= masks.coefficients.size(0)) {
                return said(
                    "mask_coefficients " + shape_of(masks.coefficients) + " has no row " + std::to_string(one.row));
            }
            if (placed(one, network, object)) {
                masks.give(one.row, network, object);
                objects.push_back(object);
            }
        }
        return true;
    } catch (const std::exception& error) {
        return said(error.what());
    }
}

CHECK_CUSTOM_PARSE_FUNC_PROTOTYPE(NvDsInferParseTrtdet)
CHECK_CUSTOM_INSTANCE_MASK_PARSE_FUNC_PROTOTYPE(NvDsInferParseTrtdetMasks)
