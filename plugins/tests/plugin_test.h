// What the tests of both plugin generations share: checks, attributes, and a logger that remembers.
#ifndef TRTDET_TESTS_PLUGIN_TEST_H
#define TRTDET_TESTS_PLUGIN_TEST_H

#include <NvInfer.h>
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

inline int failures = 0;

inline void check(bool holds, const std::string& what) {
    if (!holds) {
        ++failures;
        std::fprintf(stderr, "FAILED: %s\n", what.c_str());
    }
}

class Logger final : public nvinfer1::ILogger {
public:
    void log(Severity, nvinfer1::AsciiChar const* message) noexcept override { last = message; }
    std::string last;
};

class Finder final : public nvinfer1::ILoggerFinder {
public:
    nvinfer1::ILogger* findLogger() override { return &logger; }
    Logger logger;
};

inline Finder finder;

inline void check_said(const std::string& words) {
    check(finder.logger.last.find(words) != std::string::npos, "'" + words + "' in '" + finder.logger.last + "'");
    finder.logger.last.clear();
}

// The attributes of a node, as the parser hands them over.
class Node {
public:
    Node(std::int32_t output_type, std::vector<float> factor) : output_type_(output_type), factor_(std::move(factor)) {
        fields_.emplace_back("plugin_version", "1", nvinfer1::PluginFieldType::kCHAR, 1);
        fields_.emplace_back("output_type", &output_type_, nvinfer1::PluginFieldType::kINT32, 1);
        fields_.emplace_back("factor", factor_.data(), nvinfer1::PluginFieldType::kFLOAT32,
                             static_cast<std::int32_t>(factor_.size()));
        collection.nbFields = static_cast<std::int32_t>(fields_.size());
        collection.fields = fields_.data();
    }
    Node(const Node&) = delete;
    Node& operator=(const Node&) = delete;

    nvinfer1::PluginFieldCollection collection{};

private:
    std::int32_t output_type_;
    std::vector<float> factor_;
    std::vector<nvinfer1::PluginField> fields_;
};

inline nvinfer1::PluginTensorDesc tensor(nvinfer1::DataType type, nvinfer1::TensorFormat format, std::int32_t rank = 4) {
    nvinfer1::PluginTensorDesc desc{};
    desc.type = type;
    desc.format = format;
    desc.scale = 0.5f;
    desc.dims.nbDims = rank;
    for (std::int32_t axis = 0; axis < rank; ++axis) {
        desc.dims.d[axis] = 3;
    }
    return desc;
}

inline void* open_library(const char* path) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(2);
    }
    return library;
}

template <class Function>
Function entry(void* library, const char* name) {
    void* const symbol = dlsym(library, name);
    if (symbol == nullptr) {
        std::fprintf(stderr, "%s\n", dlerror());
        std::exit(2);
    }
    return reinterpret_cast<Function>(symbol);
}

#endif
