// Any file is a recording that can be replayed, or an EngineError.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>

#include "bundles.hpp"
#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"
#include "trtdet/recording.hpp"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const trtdet::Manifest manifest = trtdet::parse_manifest(trtdet::tests::manifest_json().dump());
    static const int file = ::memfd_create("recording", 0);
    if (::ftruncate(file, 0) != 0 || ::pwrite(file, data, size, 0) != static_cast<ssize_t>(size)) {
        std::abort();
    }
    try {
        const auto engine = trtdet::open_recording("/proc/self/fd/" + std::to_string(file), manifest);
        const auto lane = engine->new_lane();
        std::fill_n(lane->input().data(), 3 * 8 * 16, 10.0f);
        lane->run(1);
    } catch (const trtdet::EngineError&) {
    }
    return 0;
}
