#include "library.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <fstream>
#include <map>
#include <mutex>
#include <system_error>

#include "text.hpp"
#include "trtdet/errors.hpp"

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

namespace {

bool write_all(int file, const std::vector<char>& bytes) {
    std::size_t at = 0;
    while (at < bytes.size()) {
        const auto count = ::write(file, bytes.data() + at, bytes.size() - at);
        if (count < 0 && errno != EINTR) {
            return false;
        }
        at += count < 0 ? 0 : static_cast<std::size_t>(count);
    }
    return true;
}

// A file in memory that nobody can write any more; -1 where there is none to be had.
int sealed_file(const std::string& name, const std::vector<char>& bytes) {
    constexpr unsigned int executable = 0x10;  // MFD_EXEC, which Linux knows since 6.3 and may then want
    constexpr unsigned int flags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
    int file = ::memfd_create(name.c_str(), flags | executable);
    if (file < 0 && errno == EINVAL) {
        file = ::memfd_create(name.c_str(), flags);
    }
    if (file < 0) {
        return -1;
    }
    const bool written = write_all(file, bytes);
    if (!written || ::fcntl(file, F_ADD_SEALS, F_SEAL_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0) {
        ::close(file);
        return -1;
    }
    return file;
}

// The path of such a file, which stays open: were its number given to another file, the loader would take that for this
// one. Empty where there is none to be had.
std::string path_in_memory(const std::string& name, const std::vector<char>& bytes, const std::string& sha256) {
    static std::mutex mutex;
    static auto& files = *new std::map<std::string, int>;
    const std::lock_guard lock(mutex);
    const auto known = files.find(sha256);
    const int file = known != files.end() ? known->second : sealed_file(name, bytes);
    if (file < 0) {
        return {};
    }
    files.emplace(sha256, file);
    return "/proc/self/fd/" + std::to_string(file);
}

}  // namespace

LibraryCopy::LibraryCopy(
    const std::string& name, const std::vector<char>& bytes, const std::string& sha256, bool in_memory)
    : path_(in_memory ? path_in_memory(name, bytes, sha256) : std::string()) {
    if (!path_.empty()) {
        return;
    }
    std::error_code error;
    std::string made = (std::filesystem::temp_directory_path(error) / "trtdet-XXXXXX").string();
    if (error || ::mkdtemp(made.data()) == nullptr) {
        throw EngineError(
            "there is no folder to copy the library " + in_quotes(name) +
            " into; name one that can be written with TMPDIR");
    }
    folder_ = made;
    path_ = (folder_ / name).string();
    std::ofstream file(path_, std::ios::binary);
    file.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
    file.close();
    if (!file) {
        std::filesystem::remove_all(folder_, error);
        throw EngineError(
            "there is no room for a copy of the library " + in_quotes(name) + " in " + in_quotes(made) +
            "; make some, or name another folder with TMPDIR");
    }
}

LibraryCopy::~LibraryCopy() {
    if (!folder_.empty()) {
        std::error_code ignored;
        std::filesystem::remove_all(folder_, ignored);
    }
}

}  // namespace trtdet
