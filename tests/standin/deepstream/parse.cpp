// Loads a parser as nvinfer does, by the path and name of its configuration, and calls it once with what is read from
// standard input; what it found is written to standard output. All numbers are 32 bits of this machine. With a third
// argument the parser is one of masks, and each object is followed by width, height and values of its mask.

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

template <typename Object>
void write(const Object& object) {
    std::fwrite(&object.classId, sizeof object.classId, 1, stdout);
    const float values[] = {object.left, object.top, object.width, object.height, object.detectionConfidence};
    std::fwrite(values, sizeof values, 1, stdout);
}

template <typename Object>
void write_head(bool good, const std::vector<Object>& objects) {
    const std::uint32_t head[] = {good ? 1U : 0U, static_cast<std::uint32_t>(objects.size())};
    std::fwrite(head, sizeof head, 1, stdout);
}

int main(int count, char** arguments) {
    void* library = dlopen(arguments[1], RTLD_NOW);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    void* const function = dlsym(library, arguments[2]);
    if (function == nullptr) {
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
    if (count > 3) {
        std::vector<NvDsInferInstanceMaskInfo> objects;
        const auto parse = reinterpret_cast<NvDsInferInstanceMaskParseCustomFunc>(function);
        write_head(parse(layers, network, params, objects), objects);
        for (const NvDsInferInstanceMaskInfo& object : objects) {
            write(object);
            const std::uint32_t sides[] = {object.mask_width, object.mask_height};
            std::fwrite(sides, sizeof sides, 1, stdout);
            std::fwrite(object.mask, 1, object.mask_size, stdout);
            delete[] object.mask;
        }
        return 0;
    }
    std::vector<NvDsInferObjectDetectionInfo> objects;
    const auto parse = reinterpret_cast<NvDsInferParseCustomFunc>(function);
    write_head(parse(layers, network, params, objects), objects);
    for (const NvDsInferObjectDetectionInfo& object : objects) {
        write(object);
#if STANDIN_DEEPSTREAM >= 9
        if (object.rotation_angle != 0.0F) {
            return 1;
        }
#endif
    }
    return 0;
}
