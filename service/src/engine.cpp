#include "trtdet/engine.hpp"

#include <algorithm>
#include <array>
#include <cstdio>

#include "text.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

namespace {

constexpr int ampere = 80;

// "10.9.0.34" as 10, 9, 0; what follows is the number of the build, which TensorRT's own check leaves out.
std::array<int, 3> numbers(const std::string& version) {
    std::array<int, 3> found{};
    std::sscanf(version.c_str(), "%d.%d.%d", &found[0], &found[1], &found[2]);
    return found;
}

std::string as_capability(int sm) {
    return std::to_string(sm / 10) + "." + std::to_string(sm % 10);
}

bool fits(const BackendSpec& backend, int sm) {
    return std::find(backend.sms.begin(), backend.sms.end(), sm) != backend.sms.end() ||
           (backend.hardware_compatible && sm >= ampere);
}

}  // namespace

std::shared_ptr<Engine> open_engine(const Bundle& bundle, const EngineOptions& options) {
    const Manifest& manifest = bundle.manifest();
    if (options.backend == Backend::onnxruntime ||
        (options.backend == Backend::automatic && manifest.files.count("model.engine") == 0)) {
        return open_onnxruntime(bundle, options.onnxruntime);
    }
    try {
        return open_tensorrt(bundle, options.tensorrt);
    } catch (const UnavailableError& error) {
        if (options.backend == Backend::tensorrt) {
            throw;
        }
        OnnxRuntimeOptions instead = options.onnxruntime;
        instead.in_place_of = error.what();
        try {
            return open_onnxruntime(bundle, instead);
        } catch (const UnavailableError& neither) {
            throw UnavailableError(std::string(error.what()) + "; nor can its network be run, as " + neither.what());
        }
    }
}

int fitting_device(const BackendSpec& backend, const Machine& machine, int wanted) {
    if (backend.name != machine.library) {
        throw UnavailableError(
            "the engine cannot be run here, as it was built with " + printable(backend.name) + ", and " +
            machine.library + " is what is here; build it again with --backend " + machine.library);
    }
    const auto built = numbers(backend.version);
    const auto here = numbers(machine.version);
    if (backend.version_compatible ? here < built : here != built) {
        throw UnavailableError(
            "the engine cannot be run here, as it was built with " + backend.name + " " + printable(backend.version) +
            (backend.version_compatible ? " for that version and later" : "") + ", and " + machine.version +
            " is installed here; build it again, or install that version");
    }
    std::string devices;
    for (const Machine::Device& device : machine.devices) {
        if (wanted >= 0 && device.index != wanted) {
            continue;
        }
        if (fits(backend, device.sm)) {
            return device.index;
        }
        devices += (devices.empty() ? "" : ", ") + device.name + " with " + as_capability(device.sm);
    }
    if (wanted >= 0 && devices.empty()) {
        throw UnavailableError(
            "the engine cannot be run on CUDA device " + std::to_string(wanted) + ", as this machine has " +
            std::to_string(machine.devices.size()) + ", counted from 0; choose another");
    }
    std::string capabilities;
    for (const int sm : backend.sms) {
        capabilities += (capabilities.empty() ? "" : " or ") + as_capability(sm);
    }
    throw UnavailableError(
        "the engine cannot be run here, as it was built for compute capability " + capabilities +
        (backend.hardware_compatible ? " and later" : "") + ", and " +
        (wanted >= 0 ? "the device that was chosen is " : "this machine has ") +
        (devices.empty() ? "no CUDA device" : devices) + "; build it again here");
}

}  // namespace trtdet
