#include "trtdet/engine.hpp"
#include "trtdet/errors.hpp"

namespace trtdet {

std::shared_ptr<Engine> open_tensorrt(const Bundle&, const TensorRtOptions&) {
    throw EngineError(
        "this libtrtdet was built without TensorRT's headers and runs recordings only; build it again with "
        "-DTENSORRT_INCLUDE_DIR=folder of NvInfer.h");
}

std::string built_for_tensorrt() {
    return "";
}

}  // namespace trtdet
