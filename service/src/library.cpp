#include "library.hpp"

#include <dlfcn.h>

#include <system_error>

#include "text.hpp"

namespace trtdet {

Library::Library(const std::string& name, const std::vector<std::filesystem::path>& folders) {
    std::string found = name;
    for (const auto& folder : folders) {
        std::error_code ignored;
        if (std::filesystem::exists(folder / name, ignored)) {
            // With a slash in it the loader looks nowhere else.
            found = std::filesystem::absolute(folder / name).string();
            break;
        }
    }
    handle_ = dlopen(found.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_ == nullptr) {
        const char* said = dlerror();
        why_ = said != nullptr ? one_line(said) : found + " cannot be loaded";
    }
}

void* Library::address(const char* name) const {
    return dlsym(handle_, name);
}

}  // namespace trtdet
