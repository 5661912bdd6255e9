// What the bounding-box parser uses of the DeepStream SDK, declared after its published API reference ("NvDsInfer API":
// nvdsinfer.h, nvdsinfer_custom_impl.h), in the order of the fields there. With STANDIN_DEEPSTREAM=9 the object has the
// angle that release 9 added.

#pragma once

#include <type_traits>
#include <vector>

extern "C" {

enum { NVDSINFER_MAX_DIMS = 8 };

typedef struct {
    unsigned int numDims;
    unsigned int d[NVDSINFER_MAX_DIMS];
    unsigned int numElements;
} NvDsInferDims;

typedef enum { FLOAT = 0, HALF = 1, INT8 = 2, INT32 = 3 } NvDsInferDataType;

typedef struct {
    NvDsInferDataType dataType;
    NvDsInferDims inferDims;
    int bindingIndex;
    const char* layerName;
    void* buffer;
    int isInput;
} NvDsInferLayerInfo;

typedef struct {
    unsigned int width;
    unsigned int height;
    unsigned int channels;
} NvDsInferNetworkInfo;

typedef struct {
    unsigned int classId;
    float left;
    float top;
    float width;
    float height;
    float detectionConfidence;
#if STANDIN_DEEPSTREAM >= 9
    float rotation_angle;
#endif
} NvDsInferObjectDetectionInfo;

typedef struct {
    unsigned int classId;
    float left;
    float top;
    float width;
    float height;
    float detectionConfidence;
    float* mask;
    unsigned int mask_width;
    unsigned int mask_height;
    unsigned int mask_size;
} NvDsInferInstanceMaskInfo;
}

typedef struct {
    unsigned int numClassesConfigured;
    std::vector<float> perClassPreclusterThreshold;
    std::vector<float> perClassPostclusterThreshold;
} NvDsInferParseDetectionParams;

typedef bool (*NvDsInferParseCustomFunc)(
    std::vector<NvDsInferLayerInfo> const& outputLayersInfo, NvDsInferNetworkInfo const& networkInfo,
    NvDsInferParseDetectionParams const& detectionParams, std::vector<NvDsInferObjectDetectionInfo>& objectList);

#define CHECK_CUSTOM_PARSE_FUNC_PROTOTYPE(function) \
    static_assert(std::is_same<decltype(&function), NvDsInferParseCustomFunc>::value, "not a bounding-box parser");

typedef bool (*NvDsInferInstanceMaskParseCustomFunc)(
    std::vector<NvDsInferLayerInfo> const& outputLayersInfo, NvDsInferNetworkInfo const& networkInfo,
    NvDsInferParseDetectionParams const& detectionParams, std::vector<NvDsInferInstanceMaskInfo>& objectList);

#define CHECK_CUSTOM_INSTANCE_MASK_PARSE_FUNC_PROTOTYPE(function) \
    static_assert(                                                \
        std::is_same<decltype(&function), NvDsInferInstanceMaskParseCustomFunc>::value, "not a parser of masks");
