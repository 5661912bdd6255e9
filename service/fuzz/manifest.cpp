// Any text is a manifest that is read or a BundleError of one line, and what is read can be used.
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "trtdet/errors.hpp"
#include "trtdet/image.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    try {
        const trtdet::Manifest manifest = trtdet::parse_manifest({reinterpret_cast<const char*>(data), size});
        trtdet::Preprocess rule = manifest.input.preprocess;
        if (rule.height > 512 || rule.width > 512) {
            return 0;
        }
        std::vector<float> input(rule.values());
        const trtdet::Image image{5, 3, std::vector<std::uint8_t>(45, 7)};
        trtdet::preprocess(image, rule, input.data());
    } catch (const trtdet::BundleError& error) {
        // One line, of a length that a log can take.
        if (std::strchr(error.what(), '\n') != nullptr || std::strlen(error.what()) > 4096) {
            std::abort();
        }
    }
    return 0;
}
