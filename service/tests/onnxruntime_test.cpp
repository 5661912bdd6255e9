#include <catch2/catch.hpp>

#include "bundles.hpp"
#include "onnxruntime_api.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

#if __has_include(<onnxruntime_c_api.h>)
#include <onnxruntime_c_api.h>
#define PLACE(NAME) static_assert(trtdet::ort::NAME.index == offsetof(OrtApi, NAME) / sizeof(void*), #NAME)
PLACE(GetErrorMessage);
PLACE(CreateEnvWithCustomLogger);
PLACE(CreateSessionFromArray);
PLACE(Run);
PLACE(CreateSessionOptions);
PLACE(SetSessionLogSeverityLevel);
PLACE(SetIntraOpNumThreads);
PLACE(CreateCustomOpDomain);
PLACE(CustomOpDomain_Add);
PLACE(AddCustomOpDomain);
PLACE(SessionGetInputCount);
PLACE(SessionGetInputTypeInfo);
PLACE(CreateTensorWithDataAsOrtValue);
PLACE(GetTensorMutableData);
PLACE(CastTypeInfoToTensorInfo);
PLACE(GetTensorElementType);
PLACE(GetDimensionsCount);
PLACE(GetDimensions);
PLACE(GetTensorTypeAndShape);
PLACE(CreateCpuMemoryInfo);
PLACE(KernelInfoGetAttribute_float);
PLACE(KernelInfoGetAttribute_int64);
PLACE(KernelContext_GetInput);
PLACE(KernelContext_GetOutput);
PLACE(ReleaseStatus);
PLACE(ReleaseSession);
PLACE(ReleaseValue);
PLACE(ReleaseTypeInfo);
PLACE(ReleaseTensorTypeAndShapeInfo);
PLACE(ReleaseSessionOptions);
PLACE(AddSessionConfigEntry);
static_assert(offsetof(trtdet::ort::CustomOp, create_kernel) == offsetof(OrtCustomOp, CreateKernel));
static_assert(offsetof(trtdet::ort::CustomOp, output_count) == offsetof(OrtCustomOp, GetOutputTypeCount));
static_assert(offsetof(trtdet::ort::CustomOp, compute) == offsetof(OrtCustomOp, KernelCompute));
static_assert(offsetof(trtdet::ort::CustomOp, output_characteristic) == offsetof(OrtCustomOp, GetOutputCharacteristic));
static_assert(int(trtdet::ort::ElementType::float16) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
static_assert(int(trtdet::ort::ElementType::boolean) == ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL);
static_assert(int(trtdet::ort::ElementType::int64) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
static_assert(trtdet::ort::severity_error == ORT_LOGGING_LEVEL_ERROR);
#endif

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;

namespace {

// A bundle whose network is these bytes, or that has none.
Bundle bundle_in(const Folder& folder, const std::string& network, Json manifest = manifest_json()) {
    if (!network.empty()) {
        manifest["portable"] = "fp32.onnx";
    }
    write_bundle(folder, manifest, {{"fp32.onnx", network.empty() ? "model" : network}});
    return Bundle::open(folder.path());
}

OnnxRuntimeOptions in(const std::filesystem::path& folder) {
    OnnxRuntimeOptions options;
    options.library_folders = {folder};
    return options;
}

}  // namespace

TEST_CASE("a network needs a bundle that has it") {
    const Folder folder;
    CHECK_THROWS_WITH(
        open_onnxruntime(bundle_in(folder, "")),
        "the bundle has no network for onnxruntime: an older trtdet built it; build it again");
    Json manifest = manifest_json();
    manifest["quantization"]["mode"] = "implicit";
    CHECK_THROWS_WITH(
        open_onnxruntime(bundle_in(folder, "", manifest)),
        Contains("INT8 is in its engine alone; build it with --quantization explicit"));
    manifest["float_model"] = "another.onnx";
    CHECK_THROWS_WITH(bundle_in(folder, "", manifest), Contains("key 'float_model' names 'another.onnx'"));
    manifest["portable"] = "other.onnx";
    CHECK_THROWS_WITH(bundle_in(folder, "", manifest), Contains("key 'portable' names 'other.onnx'"));
}

TEST_CASE("a network in FP32 needs a bundle that has it") {
    const Folder folder;
    OnnxRuntimeOptions options;
    options.precision = Precision::in_float;
    Json manifest = manifest_json();
    manifest["portable"] = "int8.onnx";
    write_bundle(folder, manifest, {{"int8.onnx", "network"}});
    CHECK_THROWS_WITH(
        open_onnxruntime(Bundle::open(folder.path()), options),
        "the bundle has no network in FP32; build it with --backend onnxruntime, which puts one into it, or with "
        "--fp32");
}

TEST_CASE("a library that is none, or cannot be loaded, is named with what to do") {
    const Folder folder;
    const Bundle bundle = bundle_in(folder, "network");
    const Folder library;
    library.write("libonnxruntime.so.1.20.0", "no library");
    CHECK_THROWS_AS(open_onnxruntime(bundle, in(library.path())), UnavailableError);
    CHECK_THROWS_WITH(
        open_onnxruntime(bundle, in(library.path())),
        Contains("libonnxruntime.so.1.20.0") && Contains("name the folder that has libonnxruntime.so"));
}

TEST_CASE("where neither the engine nor its network can be run both reasons are told") {
    const Folder folder;
    write_bundle(folder, manifest_json(), {{"model.engine", "an engine"}});
    const Bundle bundle = Bundle::open(folder.path());
    EngineOptions options;
    CHECK_THROWS_WITH(
        open_engine(bundle, options), Contains("; nor can its network be run, as the bundle has no network"));
    options.backend = Backend::tensorrt;
    CHECK_THROWS_WITH(open_engine(bundle, options), !Contains("network be run"));
    options.backend = Backend::onnxruntime;
    CHECK_THROWS_WITH(open_engine(bundle, options), Contains("the bundle has no network for onnxruntime"));
}
