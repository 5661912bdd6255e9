// Loads a parser as nvinfer does, by the path and name of its configuration, and calls it once with what is read from
// standard input; what it found is written to standard output. All numbers are 32 bits of this machine.

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <string>
#include <vector>

#include "nvdsinfer_custom_impl.h"

namespace {

void read(void* data, std::size_t size) {
    if (std::fread(data, 1, size, stdin) != size) {
        std::abort();
    }
}

std::uint32_t number() {
    std::uint32_t value = 0;
    read(&value, sizeof value);
    return value;
}

}  // namespace

int main(int, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const auto parse = reinterpret_cast<NvDsInferParseCustomFunc>(dlsym(library, arguments[2]));
    if (parse == nullptr) {
        std::fprintf(stderr, "no function %s\n", arguments[2]);
        return 1;
    }
    NvDsInferParseDetectionParams params{};
    params.numClassesConfigured = number();
    params.perClassPreclusterThreshold.assign(params.numClassesConfigured, 0.0F);
    NvDsInferNetworkInfo network{};
    network.width = number();
    network.height = number();
    network.channels = 3;
    std::deque<std::string> names;
    std::deque<std::vector<std::uint32_t>> buffers;
    std::vector<NvDsInferLayerInfo> layers(number());
    for (NvDsInferLayerInfo& layer : layers) {
        names.emplace_back(number(), '\0');
        read(names.back().data(), names.back().size());
        layer.layerName = names.back().c_str();
        layer.dataType = static_cast<NvDsInferDataType>(number());
        layer.inferDims.numDims = number();
        layer.inferDims.numElements = 1;
        for (unsigned int axis = 0; axis < layer.inferDims.numDims; ++axis) {
            layer.inferDims.d[axis] = number();
            layer.inferDims.numElements *= layer.inferDims.d[axis];
        }
        buffers.emplace_back(layer.inferDims.numElements);
        read(buffers.back().data(), buffers.back().size() * sizeof(std::uint32_t));
        layer.buffer = buffers.back().data();
    }
    std::vector<NvDsInferObjectDetectionInfo> objects;
    const std::uint32_t head[] = {
        parse(layers, network, params, objects) ? 1U : 0U, static_cast<std::uint32_t>(objects.size())};
    std::fwrite(head, sizeof head, 1, stdout);
    for (const NvDsInferObjectDetectionInfo& object : objects) {
        std::fwrite(&object.classId, sizeof object.classId, 1, stdout);
        const float values[] = {object.left, object.top, object.width, object.height, object.detectionConfidence};
        std::fwrite(values, sizeof values, 1, stdout);
#if STANDIN_DEEPSTREAM >= 9
        if (object.rotation_angle != 0.0F) {
            return 1;
        }
#endif
    }
    return 0;
}
