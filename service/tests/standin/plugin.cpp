// A stand-in for libnvinfer_plugin, which has one plugin. TENSORRT_STANDIN_NO_PLUGINS: it refuses to register it.
#include <cstdlib>

extern "C" {

void standin_register(const char* name, void* logger);

bool initLibNvInferPlugins(void* logger, const char*) {
    if (std::getenv("TENSORRT_STANDIN_NO_PLUGINS") != nullptr) {
        return false;
    }
    standin_register("EfficientNMS_TRT", logger);
    return true;
}
}
