// Images in, detections out: pre-processing, a queue that forms batches, an engine, suppression and the way back to the
// image's own pixels.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <future>
#include <memory>
#include <vector>

#include "trtdet/bundle.hpp"
#include "trtdet/detections.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/export.hpp"
#include "trtdet/image.hpp"
#include "trtdet/masks.hpp"

namespace trtdet {

using Clock = std::chrono::steady_clock;

// What was found in one image.
struct Found {
    std::vector<Detection> detections;  // best first; boxes in pixels of the image, clipped to it
    int batch = 0;                      // how many images were run together
    Clock::duration queued{};           // from submission to the start of the run
    Clock::duration ran{};              // the run of the whole batch
    Masks masks;                        // of a two-stage detector; of side 0 where the bundle has none
    PrototypeMasks prototype_masks;     // of a one-stage detector; of count 0 where the bundle has none

    // (detections, keypoints of the manifest), in pixels of the image, within it; empty where the bundle has none.
    std::vector<Keypoint> keypoints;

    // One for each detection, in pixels of the image, not clipped to it; empty where the bundle has none.
    std::vector<RotatedBox> rotated_boxes;

    // Pastes the mask of a detection into the image, by whoever asks: it is not done beforehand.
    //
    // Throws EngineError: the bundle has no masks, or there is no such detection. ImageError: as paste_mask().
    TRTDET_API RunLengths mask(std::size_t index) const;
};

// Either what was found or why not: an Error of errors.hpp, or what the system threw.
struct Outcome {
    Found found;
    std::exception_ptr error;
};

struct DetectorOptions {
    int lanes = 2;                              // batches at the same time, each in a thread of its own
    int max_batch = 0;                          // 0 for the engine's best: its largest on a GPU, 1 on a CPU
    std::chrono::microseconds max_delay{1000};  // how long an image waits for others to make its batch larger
    std::size_t queue_capacity = 256;           // images that wait; one more is refused
    std::size_t queue_bytes = 1U << 30U;        // of the images that wait: 3 a pixel of the network's input, or floats
    int threads = 0;  // that share with a lane what is done with the images of its batch; 0 for one a core less one
    std::function<void(int batch, Clock::duration ran)> on_batch;  // told of every run, by the thread that ran it
};

// Runs a bundle. Any thread may call any member at any time, but for the destructor.
class TRTDET_API Detector {
public:
    // Checks the engine's outputs against the manifest, warms up the lanes for every batch size that they may form, so
    // that no image waits for what a first run does, and starts them.
    //
    // Throws EngineError: the outputs are not what the manifest says, there is no memory for the lanes, or the engine
    // fails.
    Detector(Manifest manifest, std::shared_ptr<Engine> engine, DetectorOptions options = {});

    // Opens a bundle's folder and what runs it: every file is compared with its SHA-256 before anything is loaded.
    //
    // Throws BundleError: as Bundle::open(). UnavailableError, EngineError: as open_engine() and the constructor.
    static std::unique_ptr<Detector> open(
        const std::filesystem::path& folder, const EngineOptions& engine = {}, DetectorOptions options = {});

    // As stop(). Not within a callback: a lane's thread cannot wait for itself.
    ~Detector();

    Detector(const Detector&) = delete;
    Detector& operator=(const Detector&) = delete;

    // Puts an image into the queue, after it was resized in the caller's thread; its pixels are not read any more then.
    //
    // deadline: from when on nobody wants the answer. An image that is still waiting then is not run.
    //
    // The future holds what was found, or throws DeadlineError or EngineError. It waits for no one when it is dropped.
    //
    // Throws ImageError: preprocess() does. OverloadedError: the queue is full. StoppedError: after stop().
    std::future<Found> detect(const ImageView& image, Clock::time_point deadline = Clock::time_point::max());

    // The same with a callback, which is called once, by a thread of the detector. It must not wait or call stop();
    // what it throws is dropped.
    //
    // client: any number for whoever the image is from. Images of different clients run in turn, those of one in their
    // order.
    void detect(
        const ImageView& image, Clock::time_point deadline, std::function<void(Outcome)> done,
        std::uint64_t client = 0);

    // Several images at once, of which the queue takes all or none: they run together as far as a batch has
    // room. In their order.
    std::vector<std::future<Found>> detect(
        Span<const ImageView> images, Clock::time_point deadline = Clock::time_point::max());

    // The same for what the network takes: float32 (3, H, W) as preprocess() makes it. Boxes and what belongs to them
    // are in pixels of the network's input and are not clipped to it.
    //
    // Throws ImageError: it has another number of values. OverloadedError, StoppedError: as above.
    void detect_input(
        std::vector<float> input, Clock::time_point deadline, std::function<void(Outcome)> done,
        std::uint64_t client = 0);

    // How many images wait.
    std::size_t queued() const;

    // How long each lane has been at work on its batch; zero where it has none.
    std::vector<Clock::duration> running() const;

    // How long the batch that was begun first of those that are not finished has been in work; zero where none is. An
    // engine that hangs shows here and nowhere else.
    Clock::duration longest_run() const;

    const Manifest& manifest() const;

    // What the engine runs on.
    std::string ran_on() const;

    // How many CUDA graphs each lane has, one for a batch size; 0 where none is used.
    int graphs() const;

    // Takes no more images, runs those that wait, and returns when the last callback has. A second call waits as well.
    void stop();

private:
    class Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace trtdet
