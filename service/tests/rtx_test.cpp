// The engine of TensorRT-RTX over the stand-ins. What does not differ from TensorRT is in tensorrt_test.cpp.
#include <catch2/catch.hpp>

#include "standin_engines.hpp"
#include "trtdet/detector.hpp"

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

TEST_CASE("an engine of TensorRT-RTX runs every batch, as a graph of its own from the second time on") {
    {
        // The stand-in ends the process where a context compiles in the background, has memory of its own, or does not
        // share what was compiled.
        const auto engine = open(dynamic());
        CHECK(engine->ran_on() == "TensorRT-RTX " + version + " (Stand-in GPU)");
        CHECK(engine->max_batch() == 4);
        const auto lane = engine->new_lane();
        const auto other = engine->new_lane();
        int run = 0;
        for (const int batch : {3, 3, 1, 4, 3, 1, 1, 4, 2, 3}) {
            CHECK(runs(*lane, batch, ++run));
            CHECK(runs(*other, batch, ++run));
        }
        CHECK(live(4) == 8);
    }
    check_nothing_is_left();
}

TEST_CASE("a detector runs an engine of TensorRT-RTX, captured before the first image") {
    {
        Detector detector(parse_manifest(manifest().dump()), open(dynamic("output a int64 2\n")));
        CHECK(detector.graphs() == 4);
        Image image;
        image.width = 16;
        image.height = 8;
        image.pixels.assign(pixels, 3);
        CHECK(!detector.detect(image).get().detections.empty());
    }
    check_nothing_is_left();
}

TEST_CASE("the engine of TensorRT-RTX is what runs where it can be, and nothing takes its place where it fails") {
    check_what_runs();
}

TEST_CASE("what is no engine of TensorRT-RTX is refused, and why") {
    CHECK(
        runnable() ==
        "engines of TensorRT-RTX " + version.substr(0, version.find('.')) + ", and networks with onnxruntime");
    Json made = manifest();
    SECTION("an engine of TensorRT") {
        made["backend"]["name"] = "tensorrt";
        made["backend"]["version"] = "10.9.0.34";
        CHECK(
            refusal("altered", made) ==
            "the engine is of TensorRT 10.9.0.34, and this libtrtdet was built with the headers of TensorRT-RTX " +
                version + "; build libtrtdet with those of TensorRT, or the bundle with --backend tensorrt-rtx");
    }
    SECTION("no engine") {
        made["backend"]["name"] = "onnxruntime";
        CHECK_THAT(refusal("altered", made), Contains("build it again with --backend tensorrt-rtx"));
    }
    SECTION("bytes that do not start as one") {
        CHECK(refusal("standin\n") == "the engine is none of TensorRT-RTX: it does not start as one; build it again");
    }
    SECTION("plugin libraries, for which it has no place") {
        const Folder folder;
        const fs::path file = folder.path() / "libsilu.so";
        fs::copy_file(standin / "libcreators.so", file);
        made["backend"]["plugins"] = {{{"file", "libsilu.so"}, {"sha256", sha256_file(file)}}};
        made["files"]["libsilu.so"] = sha256_file(file);
        write_bundle(folder, made, {{"model.engine", dynamic()}});
        CHECK_THROWS_WITH(
            open_tensorrt(Bundle::open(folder.path()), options()),
            name() + " takes no plugin libraries; build the engine again");
    }
    check_nothing_is_left();
}

TEST_CASE("what the machine lacks for an engine of TensorRT-RTX is named") {
    SECTION("the library") {
        const Some some({library});
        CHECK_THAT(
            refusal(dynamic(), manifest(), some.with_text_for(library)),
            StartsWith("the engine cannot be run here, as TensorRT-RTX 1 cannot be loaded (") &&
                Contains("; install TensorRT-RTX " + version + ", or name the folder that has its libraries"));
    }
    SECTION("its version") {
        const Setting setting("TENSORRT_STANDIN_VERSION", "1.0.0");
        CHECK_THAT(
            refusal(dynamic()),
            StartsWith("the engine cannot be run here, as it was built with tensorrt-rtx " + version + ", and 1.0.0"));
    }
    SECTION("a device of that compute capability") {
        Json made = manifest();
        made["backend"]["sms"] = {120};
        CHECK(
            refusal(dynamic(), made) ==
            "the engine cannot be run here, as it was built for compute capability 12.0, and this machine has Stand-in "
            "GPU with 8.9; build it again here");
    }
    check_nothing_is_left();
}

// Where TENSORRT_RTX_LIBRARIES names the folder of its wheel. What runs before a device is needed is all that a machine
// without one can be asked for.
TEST_CASE("the library itself is loaded and tells its version") {
    const char* const folder = std::getenv("TENSORRT_RTX_LIBRARIES");
    if (folder == nullptr) {
        WARN("skipped: TENSORRT_RTX_LIBRARIES names no folder");
        return;
    }
    const Some some({library});
    TensorRtOptions how = some.made();
    how.library_folders.emplace_back(folder);
    Json made = manifest();
    made["backend"]["version"] = "1.0.0.21";
    const std::string refused = refusal(dynamic(), made, how);
    CHECK_THAT(
        refused, StartsWith("the engine cannot be run here, as it was built with tensorrt-rtx 1.0.0.21, and 1.") &&
                     Contains(" is installed here; build it again, or install that version"));
    WARN("asked the library itself: " + refused);
    check_nothing_is_left();
}
