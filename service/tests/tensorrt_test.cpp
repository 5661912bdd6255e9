// The TensorRT engine over the stand-ins: libnvinfer of standin/tensorrt.cpp, the driver of tests/standin/cuda.c.
#include <dlfcn.h>

#include <atomic>
#include <catch2/catch.hpp>
#include <fstream>
#include <iterator>
#include <mutex>
#include <thread>

#include "library.hpp"
#include "standin_engines.hpp"
#include "trtdet/detector.hpp"

using namespace trtdet;
using namespace trtdet::tests;
using Catch::Matchers::Contains;
using Catch::Matchers::StartsWith;

TEST_CASE("the engine of TensorRT is what runs where it can be, and nothing takes its place where it fails") {
    check_what_runs();
}

TEST_CASE("an engine tells what it takes, gives and runs on") {
    {
        const auto engine = open(dynamic());
        CHECK(engine->min_batch() == 1);
        CHECK(engine->opt_batch() == 2);
        CHECK(engine->max_batch() == 4);
        CHECK(engine->ran_on() == name() + " (Stand-in GPU)");
        // In the order of the manifest; the engine has another one.
        REQUIRE(engine->outputs().size() == 2);
        CHECK(engine->outputs()[0].name == "boxes");
        CHECK(engine->outputs()[0].shape == std::vector<std::int64_t>{-1, 3, 4});
        CHECK(engine->outputs()[1].name == "scores");
        CHECK(engine->outputs()[1].shape == std::vector<std::int64_t>{-1, 3, 2});
        CHECK(engine->outputs()[1].dtype == DType::float32);
    }
    check_nothing_is_left();
}

TEST_CASE("outputs of every type are given as they are") {
    {
        const std::string more = "output a int32 2\noutput b uint8 2\noutput c int8 2\noutput d bool 2\n" +
                                 std::string(major >= 10 ? "output e int64 2\n" : "");
        const auto engine = open(dynamic(more));
        const auto lane = engine->new_lane();
        fill(*lane, 3, 4);
        lane->run(3);
        const std::size_t last = 2 * 2 + 1;  // of three images; the pixel is 4 + 2 + 1
        REQUIRE(engine->outputs().size() == (major >= 10 ? 7 : 6));
        CHECK(engine->outputs()[2].dtype == DType::int32);
        CHECK(lane->output(2).as<std::int32_t>()[last] == 14);
        CHECK(engine->outputs()[3].dtype == DType::uint8);
        CHECK(lane->output(3).as<std::uint8_t>()[last] == 14);
        CHECK(engine->outputs()[4].dtype == DType::int8);
        CHECK(engine->outputs()[5].dtype == DType::boolean);
        CHECK(lane->output(5).as<bool>()[last]);
        if (major >= 10) {
            CHECK(engine->outputs()[6].dtype == DType::int64);
            CHECK(lane->output(6).as<std::int64_t>()[last] == 14);
        }
        CHECK_THROWS_AS(lane->output(engine->outputs().size()), std::out_of_range);
    }
    check_nothing_is_left();
}

TEST_CASE("a dynamic engine runs every batch, as a graph of its own from the second time on") {
    {
        const auto engine = open(dynamic());
        const auto lane = engine->new_lane();
        CHECK(live(4) == 0);
        int run = 0;
        for (const int batch : {3, 3, 1, 4, 3, 1, 1, 4, 2, 3}) {
            CHECK(runs(*lane, batch, ++run));
        }
        CHECK(live(4) == 4);
        CHECK(engine->ran_on() == name() + " (Stand-in GPU)");
    }
    check_nothing_is_left();
}

TEST_CASE("a lane that was warmed up has its graphs, and runs as any other") {
    {
        const auto engine = open(dynamic());
        const auto lane = engine->new_lane();
        CHECK(lane->warm_up(3) == 3);
        CHECK(live(4) == 3);
        CHECK(runs(*lane, 3, 1));
        CHECK(runs(*lane, 1, 2));
        CHECK(runs(*lane, 2, 3));
        // What it was not warmed up for has no graph, then or later: capturing takes the time of several runs.
        CHECK(runs(*lane, 4, 4));
        CHECK(runs(*lane, 4, 5));
        CHECK(live(4) == 3);
    }
    check_nothing_is_left();
}

TEST_CASE("a lane that was warmed up has graphs for few images and for the largest batch") {
    {
        const auto engine = open(network + "batch 1 2 40\n");
        const auto lane = engine->new_lane();
        std::vector<long> before(41);
        for (int size = 1; size <= 40; ++size) {
            before[static_cast<std::size_t>(size)] = ran(size);
        }
        CHECK(lane->warm_up(40) == 33);
        CHECK(live(4) == 33);
        for (int size = 1; size <= 40; ++size) {
            INFO(size);
            CHECK(ran(size) > before[static_cast<std::size_t>(size)]);
        }
        for (const int batch : {1, 32, 33, 39, 40}) {
            CHECK(runs(*lane, batch, batch));
        }
        CHECK(live(4) == 33);
    }
    check_nothing_is_left();
}

TEST_CASE("a lane that is warmed up does without graphs where there is no memory, or no use for them") {
    {
        // The context of the largest batch is the last there is memory for.
        const auto engine = open(dynamic("contexts 3\n"));
        const auto lane = engine->new_lane();
        CHECK(lane->warm_up(4) == 2);
        for (const int batch : {1, 2, 3, 4}) {
            CHECK(runs(*lane, batch, batch));
        }
        CHECK_THAT(engine->ran_on(), Contains("without CUDA graphs, as a batch of 2 has no context of its own"));
    }
    {
        const auto engine = open(network + "batch 3\n");
        CHECK(engine->new_lane()->warm_up(3) == 1);
    }
    {
        const auto engine = open(network + "batch 3 4 4\n");
        CHECK(engine->new_lane()->warm_up(4) == 2);
    }
    {
        TensorRtOptions how = options();
        how.cuda_graphs = false;
        CHECK(open(dynamic(), manifest(), how)->new_lane()->warm_up(4) == 0);
    }
    check_nothing_is_left();
}

TEST_CASE("a static engine runs one batch and fills it up") {
    {
        const auto engine = open(network + "batch 3\n");
        CHECK(engine->min_batch() == 3);
        CHECK(engine->max_batch() == 3);
        CHECK(engine->outputs()[0].shape == std::vector<std::int64_t>{-1, 3, 4});
        const auto lane = engine->new_lane();
        int run = 0;
        for (const int batch : {3, 1, 2, 3}) {
            CHECK(runs(*lane, batch, ++run));
        }
        CHECK(live(4) == 1);
        CHECK(failing(*lane, 4) == "the engine takes 1 to 3 images at once, not 4; build it with another --batch");
        CHECK_THAT(failing(*lane, 0), StartsWith("the engine takes 1 to 3 images at once, not 0"));
    }
    check_nothing_is_left();
}

TEST_CASE("a batch below the smallest is filled up with its last image") {
    {
        const auto engine = open(network + "batch 3 4 4\n");
        const auto lane = engine->new_lane();
        for (int run = 0; run < 3; ++run) {
            CHECK(runs(*lane, 2, run));
            for (std::size_t pixel = 0; pixel < pixels; ++pixel) {
                REQUIRE(lane->input()[2 * pixels + pixel] == lane->input()[pixels + pixel]);
            }
        }
        // Batches of 1 to 3 are all run as 3.
        CHECK(runs(*lane, 1, 7));
        CHECK(live(4) == 1);
    }
    check_nothing_is_left();
}

TEST_CASE("graphs that are not wanted or not to be had are done without, and that is said") {
    const std::string without = name() + " (Stand-in GPU), without CUDA graphs, as ";
    TensorRtOptions how = options();
    SECTION("not asked for") {
        how.cuda_graphs = false;
        const auto engine = open(dynamic(), manifest(), how);
        CHECK(engine->ran_on() == without + "they were not asked for");
        const auto lane = engine->new_lane();
        for (int run = 0; run < 6; ++run) {
            CHECK(runs(*lane, 1 + run % 4, run));
        }
        CHECK(live(4) == 0);
    }
    SECTION("work that cannot be captured") {
        const Setting setting("CUDA_STANDIN_UNCAPTURABLE", "1");
        const bool fixed = GENERATE(true, false);
        const auto engine = open(fixed ? network + "batch 4\n" : dynamic());
        const auto lane = engine->new_lane();
        for (int run = 0; run < 6; ++run) {
            CHECK(runs(*lane, 1 + run % 4, run));
        }
        CHECK(
            engine->ran_on() ==
            without + "capturing it failed (" + name() + " failed at running the engine: it gave no reason)");
        CHECK(live(4) == 0);
    }
    SECTION("no memory for a context of each batch") {
        const auto engine = open(dynamic("contexts 2\n"));
        const auto lane = engine->new_lane();
        for (int run = 0; run < 8; ++run) {
            CHECK(runs(*lane, 1 + run % 4, run));
        }
        // The first batch has its graph all the same.
        CHECK(live(4) == 1);
        CHECK_THAT(
            engine->ran_on(),
            StartsWith(
                without + "a batch of 2 has no context of its own (" + name() +
                " failed at making an execution "
                "context: [virtualMemoryBuffer.cpp::resizePhysical::140] Error Code 2: OutOfMemory") &&
                Contains("take a smaller batch, or end what else runs)"));
    }
    SECTION("an engine of 8.6 that was built for one context") {
        const auto engine = open(dynamic("unshared\n"));
        const auto lane = engine->new_lane();
        for (int run = 0; run < 8; ++run) {
            CHECK(runs(*lane, 1 + run % 4, run));
        }
        if (major < 10) {
            CHECK(
                engine->ran_on() == without + "a batch of 1 has no context of its own (" + name() +
                                        " lets only one context use this engine: it was built for one "
                                        "(PreviewFeature.PROFILE_SHARING_0806 was "
                                        "off); build it again)");
            CHECK_THROWS_WITH(engine->new_lane(), Contains("lets only one context use this engine"));
        } else {
            CHECK(engine->ran_on() == name() + " (Stand-in GPU)");
        }
    }
    check_nothing_is_left();
}

TEST_CASE("lanes run at the same time, each with memory of its own") {
    {
        const bool graphs = GENERATE(true, false);
        TensorRtOptions how = options();
        how.cuda_graphs = graphs;
        const auto engine = open(dynamic(), manifest(), how);
        std::atomic<int> wrong{0};
        std::vector<std::thread> threads;
        for (int index = 0; index < 4; ++index) {
            threads.emplace_back([&engine, &wrong, index] {
                const auto lane = engine->new_lane();
                for (int run = 0; run < 40; ++run) {
                    wrong += runs(*lane, 1 + (run * (index + 1)) % 4, 40 * index + run) ? 0 : 1;
                }
            });
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        CHECK(wrong == 0);
    }
    check_nothing_is_left();
}

TEST_CASE("engines are opened and closed while others run, as when a bundle is replaced under load") {
    {
        const auto engine = open(dynamic());
        std::atomic<int> wrong{0};
        std::atomic<int> opening{3};
        std::vector<std::thread> threads;
        for (int index = 0; index < 3; ++index) {
            threads.emplace_back([&wrong, &opening] {
                for (int time = 0; time < 5; ++time) {
                    const auto other = open(dynamic("says 2 slow\nneeds EfficientNMS_TRT\n"));
                    wrong += runs(*other->new_lane(), 2, time) ? 0 : 1;
                    wrong += refusal(dynamic("fails loading\nsays 1 own words\n")) ==
                                     name() + " failed at loading the engine: own words"
                                 ? 0
                                 : 1;
                }
                --opening;
            });
        }
        const auto lane = engine->new_lane();
        for (int run = 0; opening > 0; ++run) {
            wrong += runs(*lane, 1 + run % 4, run) ? 0 : 1;
        }
        for (std::thread& thread : threads) {
            thread.join();
        }
        CHECK(wrong == 0);
    }
    check_nothing_is_left();
}

TEST_CASE("a lane keeps what it needs of its engine") {
    {
        auto engine = open(dynamic());
        const auto first = engine->new_lane();
        const auto second = engine->new_lane();
        engine.reset();
        CHECK(runs(*first, 2, 1));
        CHECK(runs(*second, 2, 2));
        CHECK(runs(*first, 2, 3));
    }
    check_nothing_is_left();
}

TEST_CASE("a detector runs it") {
    {
        Detector detector(parse_manifest(manifest().dump()), open(dynamic()));
        CHECK(detector.ran_on() == name() + " (Stand-in GPU)");
        // Two lanes, each warmed up for one image to four.
        CHECK(detector.graphs() == 4);
        CHECK(live(4) == 8);
        Image image;
        image.width = 16;
        image.height = 8;
        image.pixels.assign(pixels, 3);
        // A score of 3 and more is above every threshold, and the boxes are the first twelve multiples of 3.
        const Found found = detector.detect(image).get();
        REQUIRE(!found.detections.empty());
        CHECK(found.detections[0].box.x2 <= 16);
    }
    check_nothing_is_left();
}

TEST_CASE("no memory is said with what is left of it") {
    TensorRtOptions how = options();
    SECTION("on the device") {
        const Setting setting("CUDA_STANDIN_MEMORY", "6000");
        CHECK(
            refusal(dynamic(), manifest(), how) ==
            "Stand-in GPU has no 0.0 MiB of memory left: 0.0 MiB of 0.0 MiB are free; take fewer lanes, build with a "
            "smaller "
            "batch, or end what else runs on it");
    }
    SECTION("to lock on the host") {
        const Setting setting("CUDA_STANDIN_PINNED", "6000");
        CHECK(
            refusal(dynamic(), manifest(), how) ==
            "the host cannot lock 0.0 MiB of memory for copies to Stand-in GPU; take fewer lanes, or build with a "
            "smaller "
            "batch");
    }
    SECTION("for one lane more") {
        const Setting setting("CUDA_STANDIN_MEMORY", "300000000");
        const auto engine = open(dynamic("scratch 290000000\n"), manifest(), how);
        const auto lane = engine->new_lane();
        CHECK_THROWS_WITH(
            engine->new_lane(),
            StartsWith("Stand-in GPU has no 0.27 GiB of memory left: 9.5 MiB of 0.28 GiB are free"));
        CHECK(runs(*lane, 2, 1));
    }
    SECTION("for a context") {
        const auto engine = open(dynamic("contexts 1\n"), manifest(), how);
        const auto lane = engine->new_lane();
        CHECK_THROWS_WITH(
            engine->new_lane(),
            StartsWith(name() + " failed at making an execution context: [virtualMemoryBuffer.cpp"));
    }
    check_nothing_is_left();
}

TEST_CASE("what TensorRT refuses is said in its own words") {
    const auto said = GENERATE(table<std::string, std::string>(
        {{"", "the engine is empty; build it again"},
         {"vtrt and what follows", "the engine is none of TensorRT: it does not start as one; build it again"},
         {"altered",
          " failed at loading the engine: 1: [stdArchiveReader.cpp::StdArchiveReader::32] Error Code 1: Serialization "
          "(Serialization assertion magicTagRead == kMAGIC_TAG failed.Magic tag does not match); it was altered or cut "
          "short; build it again"},
         {dynamic("fails loading\n"), " failed at loading the engine: it gave no reason"},
         {dynamic("fails loading\nsays 1 first\nsays 3 no error\nsays 0 second\n"),
          " failed at loading the engine: first; second"},
         {dynamic("fails loading\nsays-elsewhere 1 in a thread of its own\n"),
          " failed at loading the engine: in a thread of its own"},
         {dynamic("fails loading\nsays 1 expecting library version 8.6.1 got 8.6.0\n"),
          " failed at loading the engine: expecting library version 8.6.1 got 8.6.0; build it again with the TensorRT "
          "installed here"},
         {dynamic("fails loading\nsays 1 The engine is for an incompatible device\n"),
          "incompatible device; build it again on this machine"},
         {dynamic("needs Silu\n"),
          "give the library that has the plugin with --set engine.plugins=LIBRARY when building"},
         {dynamic("fails shape\n"),
          " failed at setting a batch of 4: IExecutionContext::setInputShape: Error Code 3: API Usage Error (Static "
          "dimension mismatch while setting input shape.)"},
         {dynamic("fails address\n"),
          " failed at taking memory for 'images': IExecutionContext::setTensorAddress: the address is not aligned"},
         {dynamic("contexts 0\n"), " failed at making an execution context: "},
         {dynamic("output odd fp8 2\n"),
          "tensor 'odd' of the engine is of type 6 (nvinfer1::DataType); allowed: float32, float16, int8, uint8, "
          "int32, "
          "int64, bool"},
         {dynamic("unknown boxes\n"),
          "output 'boxes' of the engine has a shape, 4x3x-1, that is known only when it ran; build it with --nms "
          "native "
          "or --nms host"},
         {dynamic("on-host boxes\n"),
          "tensor 'boxes' of the engine is a shape on the host; build it from another model"},
         {"standin\ninput images 3 8 8\nbatch 2\n",
          "the engine takes 'images' 2x3x8x8, and the manifest says 'images' Nx3x8x16; build it again"},
         {"standin\ninput images 3 8 16\nbatch 0\n", "the engine takes batches of 0 to 0; build it again"}}));
    CHECK_THAT(refusal(std::get<0>(said)), Contains(std::get<1>(said)));
    CHECK_THAT(refusal(std::get<0>(said)), !Contains("\n"));
    check_nothing_is_left();
}

TEST_CASE("what a lane meets is said in the library's words, and the lane goes quietly") {
    SECTION("TensorRT") {
        const auto lane = open(dynamic("fails running\n"))->new_lane();
        const std::string words = name() +
                                  " failed at running the engine: [runner.cpp::execute::416] Error Code 1: Cuda "
                                  "Runtime (invalid resource handle)";
        CHECK(failing(*lane, 2) == words);
        CHECK(failing(*lane, 2) == words);
    }
    SECTION("an output that depends on the batch otherwise") {
        const auto lane = open(dynamic("grows boxes\n"))->new_lane();
        CHECK(failing(*lane, 4) == "it ran");
        CHECK(
            failing(*lane, 2) == "output 'boxes' of the engine is 2x3x2 with a batch of 2, not 2x3x4; build it again");
    }
    check_nothing_is_left();
}

TEST_CASE("plugin libraries are compared with the manifest, and what was compared is loaded") {
    const Folder folder;
    Json made = manifest();
    const fs::path file = folder.path() / "libsilu.so";
    fs::copy_file(standin / "libcreators.so", file);
    const std::string hash = sha256_file(file);
    made["backend"]["plugins"] = {{{"file", "libsilu.so"}, {"sha256", hash}}};
    made["files"]["libsilu.so"] = hash;
    const auto open_it = [&](const std::string& engine) {
        write_bundle(folder, made, {{"model.engine", engine}});
        return open_tensorrt(Bundle::open(folder.path()), options());
    };
    SECTION("one that fits") {
        // A second engine of the same library, as when a bundle is replaced under load.
        const auto engine = open_it(dynamic("needs Silu\n"));
        const auto other = open_it(dynamic("needs Silu\n"));
        CHECK(runs(*engine->new_lane(), 2, 1));
        CHECK(runs(*other->new_lane(), 2, 2));
        // Not the file, which may be another one by then.
        std::ifstream maps("/proc/self/maps");
        const std::string loaded((std::istreambuf_iterator<char>(maps)), std::istreambuf_iterator<char>());
        CHECK_THAT(loaded, Contains("/memfd:libsilu.so") && !Contains(file.string()));
    }
    SECTION("a relative path to the bundle") {
        const fs::path before = fs::current_path();
        write_bundle(folder, made, {{"model.engine", dynamic("needs Silu\n")}});
        fs::current_path(folder.path().parent_path());
        CHECK_NOTHROW(open_tensorrt(Bundle::open(folder.path().filename()), options()));
        fs::current_path(before);
    }
    SECTION("one that was replaced after the bundle was verified") {
        write_bundle(folder, made, {{"model.engine", dynamic("needs Silu\n")}});
        const Bundle bundle = Bundle::open(folder.path());
        folder.write("libsilu.so", "another library");
        CHECK_THROWS_AS(open_tensorrt(bundle, options()), BundleError);
        CHECK_THROWS_WITH(open_tensorrt(bundle, options()), StartsWith("'libsilu.so' was altered: sha256 "));
    }
    SECTION("one that is no library") {
        folder.write("libsilu.so", "not a library");
        const std::string other = sha256_file(file);
        made["backend"]["plugins"][0]["sha256"] = other;
        made["files"]["libsilu.so"] = other;
        CHECK_THROWS_WITH(
            open_it(dynamic("needs Silu\n")),
            StartsWith(name() + " failed at loading the plugin library '" + fs::canonical(folder.path()).string()) &&
                Contains("Could not load plugin library: "));
    }
    SECTION("one that the engine carries is not loaded, and its code is allowed") {
        made["backend"]["plugins"][0]["embedded"] = true;
        CHECK_NOTHROW(open_it(dynamic("host-code\n")));
        CHECK_THROWS_WITH(open_it(dynamic("needs Silu\n")), Contains("not found in Plugin Registry"));
    }
    SECTION("code of the host is not allowed otherwise") {
        CHECK_THROWS_WITH(open_it(dynamic("host-code\n")), Contains("Engine has host code, which is not allowed"));
        made["backend"]["version_compatible"] = true;
        CHECK_NOTHROW(open_it(dynamic("host-code\n")));
    }
    check_nothing_is_left();
}

TEST_CASE("a copy of a library is that of its bytes, and nobody else's") {
    std::ifstream file(standin / "libcreators.so", std::ios::binary);
    const std::vector<char> bytes((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());
    const auto creators = [](const std::string& path) {
        void* const library = ::dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL);
        REQUIRE(library != nullptr);
        const std::string found = reinterpret_cast<const char* (*)()>(::dlsym(library, "standin_creators"))();
        ::dlclose(library);
        return found;
    };
    SECTION("in memory") {
        const LibraryCopy copy("libcreators.so", bytes, "one");
        const LibraryCopy again("libcreators.so", bytes, "one");
        const LibraryCopy other("libcreators.so", {'a'}, "other");
        CHECK(copy.path() == again.path());
        CHECK(copy.path() != other.path());
        CHECK(creators(copy.path()) == "Silu");
        std::ofstream change(copy.path(), std::ios::in | std::ios::out | std::ios::binary);
        change << "changed" << std::flush;
        CHECK(!change);
        CHECK(creators(copy.path()) == "Silu");
    }
    SECTION("in a folder") {
        fs::path path;
        {
            const LibraryCopy copy("libcreators.so", bytes, "one", false);
            path = copy.path();
            CHECK(creators(path.string()) == "Silu");
            CHECK(fs::status(path.parent_path()).permissions() == fs::perms::owner_all);
        }
        CHECK(!fs::exists(path.parent_path()));
        const Setting setting("TMPDIR", standin.string() + "/nowhere");
        CHECK_THROWS_AS(LibraryCopy("libcreators.so", bytes, "one", false), EngineError);
    }
}

TEST_CASE("TensorRT's own plugins are there for engines that need them") {
    Json made = manifest();
    made["nms"]["where"] = "efficient";
    const std::string engine = dynamic("needs EfficientNMS_TRT\n");
    SECTION("loaded") {
        CHECK(runs(*open(engine, made)->new_lane(), 2, 1));
    }
    SECTION("not to be had, which is said before the engine is loaded") {
        const Some some({plugins});
        CHECK_THAT(
            refusal(engine, made, some.with_text_for(plugins)),
            StartsWith(
                "the engine needs TensorRT's own plugins (EfficientNMS), and they cannot be loaded (" +
                some.path().string()) &&
                Contains("; install all of " + name()));
    }
    SECTION("not to be had and not needed") {
        const Some some({plugins});
        TensorRtOptions how = some.with_text_for(plugins);
        std::string said;
        how.log = [&said](int severity, std::string_view message) {
            said += std::to_string(severity) + " " + std::string(message);
        };
        CHECK(runs(*open(dynamic(), manifest(), how)->new_lane(), 2, 1));
        CHECK_THAT(said, StartsWith("2 TensorRT's own plugins were not loaded (" + some.path().string()));
    }
    SECTION("not to be had and needed for something else") {
        const Some some({plugins});
        CHECK_THAT(
            refusal(dynamic("needs ROIAlign_TRT\n"), manifest(), some.with_text_for(plugins)),
            Contains("not found in Plugin Registry") && Contains("; TensorRT's own plugins were not loaded ("));
    }
    SECTION("not registered") {
        const Setting setting("TENSORRT_STANDIN_NO_PLUGINS", "1");
        CHECK_THAT(refusal(engine, made), Contains("TensorRT's own plugins were not registered"));
    }
    check_nothing_is_left();
}

TEST_CASE("a library of another version is refused before anything is loaded with it") {
    const auto of = [](int the_major, int minor, int patch) {
        return std::to_string(the_major) + "." + std::to_string(minor) + "." + std::to_string(patch);
    };
    const std::string later = of(major, major < 10 ? 9 : 90, 9);
    SECTION("a later one") {
        const Setting setting("TENSORRT_STANDIN_VERSION", later);
        CHECK(
            refusal("altered") == "the engine cannot be run here, as it was built with tensorrt " + version + ", and " +
                                      later + " is installed here; build it again, or install that version");
        Json made = manifest();
        made["backend"]["version_compatible"] = true;
        CHECK(open(dynamic("host-code\n"), made)->ran_on() == "TensorRT " + later + " (Stand-in GPU)");
    }
    SECTION("one of another major version under that name") {
        const Setting setting("TENSORRT_STANDIN_VERSION", of(major + 1, 0, 0));
        CHECK(
            refusal("altered") == "the library that was found is TensorRT " + of(major + 1, 0, 0) +
                                      ", and this libtrtdet was "
                                      "built with the headers of " +
                                      version + "; install TensorRT " + std::to_string(major) +
                                      ", or build libtrtdet with "
                                      "the headers of " +
                                      std::to_string(major + 1));
    }
    SECTION("an engine of another major version") {
        Json made = manifest();
        made["backend"]["version"] = of(major - 1, 6, 0);
        CHECK(
            refusal("altered", made) == "the engine was built with TensorRT " + of(major - 1, 6, 0) +
                                            ", and this libtrtdet with "
                                            "the headers of " +
                                            version + "; build libtrtdet with those of TensorRT " +
                                            std::to_string(major - 1) + ", or the engine again with TensorRT " +
                                            std::to_string(major));
    }
    SECTION("the number of the build does not matter") {
        Json made = manifest();
        made["backend"]["version"] = version + ".34";
        CHECK_NOTHROW(open(dynamic(), made));
    }
}

TEST_CASE("a bundle without an engine for this library is refused") {
    Json made = manifest();
    SECTION("TensorRT-RTX's") {
        made["backend"]["name"] = "tensorrt-rtx";
        made["backend"]["version"] = "1.7.1.116";
        CHECK(
            refusal("vtrt", made) ==
            "the engine is of TensorRT-RTX 1.7.1.116, and this libtrtdet was built with the headers of "
            "TensorRT " +
                version + "; build libtrtdet with those of TensorRT-RTX, or the bundle with --backend tensorrt");
    }
    SECTION("onnxruntime's") {
        made["backend"]["name"] = "onnxruntime";
        CHECK(
            refusal("model", made) ==
            "the bundle has no engine: it was built with --backend onnxruntime; build it again with "
            "--backend tensorrt");
    }
    SECTION("one that lost it") {
        const Folder folder;
        write_bundle(folder, made, {});
        CHECK_THROWS_AS(open_tensorrt(Bundle::open(folder.path()), options()), EngineError);
    }
    SECTION("one whose engine was replaced after it was verified") {
        const Folder folder;
        write_bundle(folder, made, {{"model.engine", dynamic()}});
        const Bundle bundle = Bundle::open(folder.path());
        folder.write("model.engine", dynamic("fails loading\n"));
        CHECK_THROWS_AS(open_tensorrt(bundle, options()), BundleError);
        check_nothing_is_left();
    }
}

TEST_CASE("what is missing on a machine is said") {
    SECTION("a device of the right kind") {
        const Setting setting("CUDA_STANDIN_SM", "75");
        CHECK_THAT(
            refusal("altered"),
            Contains("built for compute capability 8.9, and this machine has Stand-in GPU with 7.5"));
    }
    SECTION("any device") {
        const Setting setting("CUDA_STANDIN_DEVICES", "0");
        const Setting shown("CUDA_VISIBLE_DEVICES", "");
        CHECK(
            refusal("altered") ==
            "the engine cannot be run here, as this machine's CUDA driver shows no device "
            "(CUDA_VISIBLE_DEVICES is ''); run this on a machine with a CUDA device");
    }
    SECTION("a driver that fits its kernel module") {
        const Setting setting("CUDA_STANDIN_INIT", "803");
        CHECK(
            refusal("altered") ==
            "the engine cannot be run here, as this machine's CUDA driver does not fit: error 803, system "
            "has unsupported display driver / cuda driver combination; update the driver");
    }
    SECTION("a driver that starts") {
        const Setting setting("CUDA_STANDIN_INIT", "999");
        CHECK(
            refusal("altered") ==
            "the engine cannot be run here, as this machine's CUDA driver does not start: error 999, "
            "unknown error");
    }
    SECTION("a driver that can be loaded") {
        const Some some({"libcuda.so.1"});
        CHECK_THAT(
            refusal("altered", manifest(), some.with_text_for("libcuda.so.1")),
            StartsWith("the engine cannot be run here, as this machine has no CUDA driver (" + some.path().string()) &&
                Contains("; run this on a machine with a CUDA device and NVIDIA's driver"));
    }
    SECTION("a driver that is not older than CUDA 11.4") {
        const Some some({"libcuda.so.1"});
        fs::create_symlink(standin / "libcreators.so", some.path() / "libcuda.so.1");
        CHECK(
            refusal("altered", manifest(), some.made()) ==
            "the engine cannot be run here, as this machine's CUDA driver does "
            "not fit: it has no cuInit; update the driver");
    }
    SECTION("TensorRT") {
        const Some some({library});
        CHECK_THAT(
            refusal("altered", manifest(), some.with_text_for(library)),
            StartsWith(
                "the engine cannot be run here, as TensorRT " + std::to_string(major) + " cannot be loaded (" +
                some.path().string()) &&
                Contains("; install TensorRT " + version + ", or name the folder that has its libraries"));
    }
    SECTION("a library that is TensorRT") {
        const Some some({library});
        fs::create_symlink(standin / "libcreators.so", some.path() / library);
        CHECK(
            refusal("altered", manifest(), some.made()) == library +
                                                               " is no library of TensorRT: it has no "
                                                               "createInferRuntime_INTERNAL; install TensorRT " +
                                                               version);
    }
    SECTION("a runtime") {
        const Setting setting("TENSORRT_STANDIN_NULL", "1");
        CHECK(
            refusal("altered") ==
            name() +
                " failed at loading the engine: CUDA initialization failure with error: 222; update "
                "the driver to one for this TensorRT's CUDA");
        check_nothing_is_left();
    }
}

TEST_CASE("what TensorRT reports is told to whoever opened the engine, and to nobody else") {
    struct Heard {
        TensorRtOptions options() {
            TensorRtOptions made = ::options();
            made.log = [this](int severity, std::string_view message) {
                const std::lock_guard lock(mutex);
                messages.emplace_back(severity, message);
            };
            return made;
        }
        std::mutex mutex;
        std::vector<std::pair<int, std::string>> messages;
    };
    Heard one;
    Heard other;
    const auto first = open(dynamic("says 2 slow format\nsays 4 detail\n"), manifest(), one.options());
    CHECK(one.messages == std::vector<std::pair<int, std::string>>{{2, "slow format"}, {4, "detail"}});
    // The library keeps its first logger for good; engines that come later, and after others went, are heard all the
    // same.
    const auto second = open(dynamic("says-elsewhere 3 from another thread\n"), manifest(), other.options());
    CHECK(one.messages.size() == 2);
    CHECK(other.messages == std::vector<std::pair<int, std::string>>{{3, "from another thread"}});
    const auto lane = open(dynamic("says 2 in the end\nfails running\n"), manifest(), one.options())->new_lane();
    CHECK(failing(*lane, 2) != "it ran");
    REQUIRE(one.messages.size() == 4);
    CHECK(one.messages[2].second == "in the end");
    CHECK(one.messages[3].first == 1);

    TensorRtOptions throwing = options();
    throwing.log = [](int, std::string_view) { throw std::runtime_error("not through TensorRT"); };
    CHECK(
        refusal(dynamic("fails loading\nsays 1 kept\n"), manifest(), throwing) ==
        name() + " failed at loading the engine: kept");
}

TEST_CASE("two engines that fail at the same time are each told their own words") {
    std::string other;
    TensorRtOptions how = options();
    how.log = [&other](int, std::string_view message) {
        if (message == "begun") {
            std::thread([&other] { other = refusal(dynamic("fails loading\nsays 1 of the other\n")); }).join();
        }
    };
    const std::string words = name() + " failed at loading the engine: ";
    CHECK(
        refusal(dynamic("fails loading\nsays 2 begun\nsays 1 of this one\n"), manifest(), how) ==
        words + "of this one");
    CHECK(other == words + "of the other");
    check_nothing_is_left();
}

// The last one: for the process that is the end of the device.
TEST_CASE("a device that failed takes no more work, and says so") {
    const Setting setting("CUDA_STANDIN_FAULT", "700");
    const auto engine = open(dynamic());
    auto lane = engine->new_lane();
    const std::string words =
        "the GPU failed at what it ran (cuStreamSynchronize: error 700, an illegal memory access was encountered) and "
        "takes "
        "no more work from this process; start the program again, and if it fails again, build the engine again or "
        "test the "
        "GPU";
    CHECK(failing(*lane, 2) == words);
    CHECK_THAT(failing(*lane, 2), StartsWith("the GPU failed at what it ran (cuMemcpyHtoDAsync: error 700"));
    lane.reset();
}
