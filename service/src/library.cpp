#include "library.hpp"

#include <dlfcn.h>

#include <system_error>

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

std::string one_line(const std::string& text) {
    std::string line;
    bool gap = false;
    for (const char one : text) {
        if (static_cast<unsigned char>(one) <= ' ' || one == '\x7f') {
            gap = !line.empty();
            continue;
        }
        if (gap) {
            line += ' ';
        }
        gap = false;
        line += one;
    }
    constexpr std::size_t limit = 300;
    return line.size() <= limit ? line : line.substr(0, limit - 3) + "...";
}

}  // namespace trtdet
