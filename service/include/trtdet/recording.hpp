// What runs a bundle in tests, where nothing else can: what was recorded of it. A library of its own,
// trtdet::recording.
#pragma once

#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <vector>

#include "trtdet/bundle.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/image.hpp"

namespace trtdet {

struct RecordingOptions {
    // How long a run takes, whatever its batch, so that a queue can be seen to work.
    std::chrono::microseconds run_time{0};
};

// Opens what service/tests/record.py wrote: the raw outputs of a bundle for certain images. A run looks up each image
// by the mean of its pixels in 16 x 16 cells, and gives the recorded outputs of the nearest one.
//
// The lanes throw EngineError for an image that differs from each recorded one by more than a grey level in some cell.
//
// Throws EngineError: the file is missing, damaged, or was recorded from another bundle.
std::shared_ptr<Engine> open_recording(
    const std::filesystem::path& file, const Manifest& manifest, const RecordingOptions& options = {});

// Images that the recording takes for those it was made of, the first of them: of the network's size, each cell filled
// with its mean. So that a recording can be run where its images are not.
//
// Throws EngineError: as open_recording().
std::vector<Image> recorded_images(const std::filesystem::path& file, const Manifest& manifest, std::size_t most);

}  // namespace trtdet
