// The two halves of preprocess(): what has to be done where the image is, and what can be done where it is needed.
#pragma once

#include <cstdint>
#include <vector>

#include "trtdet/image.hpp"

namespace trtdet {

// An image at the size that it has in the network's input, its grey levels still bytes: a quarter of what they become.
struct Resized {
    std::vector<std::uint8_t> pixels;  // 3 * width * height, rows from the top
    bool bgr = false;
    int x = 0;  // columns and rows of border before it
    int y = 0;
    int width = 0;
    int height = 0;
    Placement placement;
};

// Throws ImageError: as preprocess().
Resized resize(const ImageView& image, const Preprocess& to);

// Writes the network's input, all of it.
void normalise(const Resized& image, const Preprocess& to, float* output);

}  // namespace trtdet
