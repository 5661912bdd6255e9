// The bundle that is served, and how another takes its place while requests run.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "log.hpp"
#include "metrics.hpp"
#include "trtdet/detector.hpp"
#include "trtdet/engine.hpp"

namespace trtdet::serve {

struct ModelOptions {
    std::string name;  // that it is served as
    std::filesystem::path bundle;

    // What is run in place of an engine: a recording, or a folder with CONTENT_HASH.recording of each bundle. A
    // recording belongs to one bundle, so with a folder the next one's can be put there before the bundle is replaced.
    std::optional<std::filesystem::path> recording;
    std::chrono::microseconds recording_time{0};  // of a run

    std::filesystem::path public_key;  // that must have signed the bundle; empty to ask for no signature
    EngineOptions engine;              // what runs it else, and how; messages go to the log
    DetectorOptions detector;
    std::chrono::milliseconds reload_interval{1000};  // 0 for none
};

// A bundle that is opened, verified and run; a changed one replaces it.
//
// A thread looks at the folder from time to time. What has changed is opened beside what runs, and only once it is
// ready do new requests get it. A bundle that is refused is logged, counted, and tried again when it has changed again.
// A detector is stopped and destroyed by that thread after the last request has let go of it.
//
// Any thread may call any member at any time, but for the destructor.
class Model {
public:
    // Opens the bundle. The log and the metrics must live longer than this.
    //
    // Throws BundleError, EngineError: it cannot be opened or run.
    Model(ModelOptions options, Log& log, Metrics& metrics);

    // As stop().
    ~Model();

    Model(const Model&) = delete;
    Model& operator=(const Model&) = delete;

    // What runs now; empty while it is unloaded, and after stop(). Whoever holds it can go on with it for as long as
    // needed.
    std::shared_ptr<Detector> current() const;

    // Opens the bundle anew, changed or not, soon and by the other thread.
    void reload();

    // Opens the bundle anew, changed or not, or lets go of the detector until it is loaded again: what changes in the
    // folder changes nothing meanwhile. Soon and by the other thread, which calls done with what went wrong; where a
    // bundle cannot be opened the one before stays.
    void change(bool load, std::function<void(const std::string& problem)> done);

    // Lets go of the detector, and returns when it and all before it are destroyed: nobody else may still hold one.
    void stop();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet::serve
