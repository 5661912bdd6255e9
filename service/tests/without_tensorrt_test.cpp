#include <catch2/catch.hpp>

#include "bundles.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

using namespace trtdet;
using namespace trtdet::tests;

TEST_CASE("without TensorRT's headers there is no engine, and what to do is said") {
    CHECK(built_for_tensorrt().empty());
    const Folder folder;
    write_bundle(folder, manifest_json(), {{"model.engine", "an engine"}});
    CHECK_THROWS_WITH(
        open_tensorrt(Bundle::open(folder.path())),
        "this libtrtdet was built without TensorRT's headers and runs networks with onnxruntime; for engines build it "
        "with -DTENSORRT_INCLUDE_DIR=the folder of NvInfer.h");
    CHECK_THROWS_AS(open_tensorrt(Bundle::open(folder.path())), UnavailableError);
}
