#include <catch2/catch.hpp>

#include "bundles.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

using namespace trtdet;
using namespace trtdet::tests;

TEST_CASE("without TensorRT's headers there is no engine, and what to do is said") {
    CHECK(built_for_tensorrt().empty());
    CHECK(runnable() == "networks with onnxruntime");
    const auto refused = [](const std::string& backend) {
        const Folder folder;
        Json manifest = manifest_json();
        manifest["backend"]["name"] = backend;
        write_bundle(folder, manifest, {{"model.engine", "an engine"}});
        try {
            open_tensorrt(Bundle::open(folder.path()));
        } catch (const UnavailableError& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(
        refused("tensorrt") ==
        "this libtrtdet was built without the headers of TensorRT and runs networks with onnxruntime; for engines "
        "build it "
        "with -DTENSORRT_INCLUDE_DIR=the folder of its NvInfer.h");
    CHECK(
        refused("tensorrt-rtx") ==
        "this libtrtdet was built without the headers of TensorRT-RTX and runs networks with onnxruntime; for engines "
        "build "
        "it with -DTENSORRT_INCLUDE_DIR=the folder of its NvInfer.h");
}
