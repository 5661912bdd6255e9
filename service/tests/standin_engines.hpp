// Engines of the stand-ins for TensorRT or TensorRT-RTX and for the driver, and what the tests ask of them.
#pragma once

#include <dlfcn.h>

#include <algorithm>
#include <catch2/catch.hpp>
#include <cstdlib>
#include <string>
#include <vector>

#include "bundles.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

namespace trtdet::tests {

namespace fs = std::filesystem;

inline const fs::path standin = STANDIN;
inline const std::string version = built_for_tensorrt();
inline const int major = std::stoi(version);
// The words that differ between the libraries: STANDIN_RTX where the headers are those of TensorRT-RTX.
#ifdef STANDIN_RTX
inline const std::string backend = "tensorrt-rtx";
inline const std::string title = "TensorRT-RTX";
inline const std::string library = "libtensorrt_rtx.so." + std::to_string(major);
inline const std::string first_line = "vtrt\n";
#else
inline const std::string backend = "tensorrt";
inline const std::string title = "TensorRT";
inline const std::string library = "libnvinfer.so." + std::to_string(major);
inline const std::string first_line = "standin\n";
#endif
inline const std::string plugins = "libnvinfer_plugin.so." + std::to_string(major);

inline constexpr std::size_t pixels = 3 * 8 * 16;

// An environment variable for as long as the object lives.
class Setting {
public:
    Setting(std::string name, const std::string& value) : name_(std::move(name)) {
        ::setenv(name_.c_str(), value.c_str(), 1);
    }
    ~Setting() { ::unsetenv(name_.c_str()); }
    Setting(const Setting&) = delete;
    Setting& operator=(const Setting&) = delete;

private:
    std::string name_;
};

// What of the driver is alive: 0 device memory, 1 pinned memory, 2 streams, 3 events, 4 graphs, 5 contexts.
inline long live(int kind) {
    void* driver = ::dlopen("libcuda.so.1", RTLD_NOW | RTLD_NOLOAD);
    REQUIRE(driver != nullptr);
    const long count = reinterpret_cast<long (*)(int)>(::dlsym(driver, "standin_live"))(kind);
    ::dlclose(driver);
    return count;
}

// How often the library has run so many images together.
inline long ran(int images) {
    void* found = ::dlopen(library.c_str(), RTLD_NOW | RTLD_NOLOAD);
    REQUIRE(found != nullptr);
    const long count = reinterpret_cast<long (*)(int)>(::dlsym(found, "standin_runs"))(images);
    ::dlclose(found);
    return count;
}

inline void check_nothing_is_left() {
    for (int kind = 0; kind < 6; ++kind) {
        CHECK(live(kind) == 0);
    }
}

inline const std::string network =
    first_line + "input images 3 8 16\noutput scores float32 3 2\noutput boxes float32 3 4\nscratch 1024\n";

inline std::string dynamic(const std::string& more = "") {
    return network + "batch 1 2 4\n" + more;
}

// A manifest for the stand-ins.
inline Json manifest() {
    Json made = manifest_json();
    made["backend"]["name"] = backend;
    made["backend"]["version"] = version;
    made["backend"]["sms"] = {89};
    return made;
}

inline TensorRtOptions options() {
    TensorRtOptions made;
    made.library_folders = {standin};
    return made;
}

inline std::shared_ptr<Engine> open(
    const std::string& engine, const Json& made = manifest(), const TensorRtOptions& how = options()) {
    const Folder folder;
    write_bundle(folder, made, {{"model.engine", engine}});
    return open_tensorrt(Bundle::open(folder.path()), how);
}

inline std::string refusal(
    const std::string& engine, const Json& made = manifest(), const TensorRtOptions& how = options()) {
    try {
        open(engine, made, how);
    } catch (const EngineError& error) {
        return error.what();
    }
    return "it was opened";
}

inline std::string failing(Lane& lane, int batch) {
    try {
        lane.run(batch);
    } catch (const EngineError& error) {
        return error.what();
    }
    return "it ran";
}

inline std::string name() {
    return title + " " + version;
}

// Fills the images of a batch so that each run differs from every other, and gives what fills them.
inline float fill(Lane& lane, int batch, int run) {
    const auto seed = static_cast<float>(run % 50);
    for (std::size_t image = 0; image < static_cast<std::size_t>(batch); ++image) {
        for (std::size_t pixel = 0; pixel < pixels; ++pixel) {
            lane.input()[image * pixels + pixel] = seed + static_cast<float>(image) + static_cast<float>(pixel % 7);
        }
    }
    return seed;
}

// Whether the outputs, boxes of 12 and scores of 6 numbers, are what the stand-in makes of those images.
inline bool right(const Lane& lane, int batch, float seed) {
    for (std::size_t index = 0; index < 2; ++index) {
        const std::size_t elements = index == 0 ? 12 : 6;
        const auto found = lane.output(index).as<float>();
        for (std::size_t image = 0; image < static_cast<std::size_t>(batch); ++image) {
            for (std::size_t element = 0; element < elements; ++element) {
                const float pixel = seed + static_cast<float>(image) + static_cast<float>(element % 7);
                if (found[image * elements + element] != static_cast<float>(element + 1) * pixel) {
                    return false;
                }
            }
        }
    }
    return true;
}

inline bool runs(Lane& lane, int batch, int run) {
    const float seed = fill(lane, batch, run);
    lane.run(batch);
    return right(lane, batch, seed);
}

// The stand-ins but for those that are named, in a folder.
class Some {
public:
    explicit Some(const std::vector<std::string>& left_out) {
        for (const std::string& file : {std::string("libcuda.so.1"), library, plugins}) {
            if (fs::exists(standin / file) && std::find(left_out.begin(), left_out.end(), file) == left_out.end()) {
                fs::create_symlink(standin / file, folder_.path() / file);
            }
        }
    }

    // In place of a library: a file that is none.
    TensorRtOptions with_text_for(const std::string& file) const {
        folder_.write(file, "not a library");
        return made();
    }

    TensorRtOptions made() const {
        TensorRtOptions found;
        found.library_folders = {folder_.path()};
        return found;
    }

    const fs::path& path() const { return folder_.path(); }

private:
    Folder folder_;
};

// The engine runs where it can, and nothing takes its place where it fails.
inline void check_what_runs() {
    using Catch::Matchers::Contains;
    {
        const Folder folder;
        write_bundle(folder, manifest(), {{"model.engine", dynamic()}});
        EngineOptions how;
        how.tensorrt = options();
        CHECK(open_engine(Bundle::open(folder.path()), how)->ran_on() == name() + " (Stand-in GPU)");
        // The machine's fault leads to the network, which this bundle lacks; the engine's own is told as it is.
        const Some some({library});
        how.tensorrt = some.with_text_for(library);
        CHECK_THROWS_WITH(
            open_engine(Bundle::open(folder.path()), how),
            Contains("; nor can its network be run, as the bundle has no"));
        how.tensorrt = options();
        write_bundle(folder, manifest(), {{"model.engine", ""}});
        CHECK_THROWS_WITH(open_engine(Bundle::open(folder.path()), how), !Contains("network"));
    }
    check_nothing_is_left();
}

}  // namespace trtdet::tests
