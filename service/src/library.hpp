// Shared libraries that are loaded when they are needed, so that a program starts on a machine that has none of them.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace trtdet {

// A shared library, loaded for this process alone (RTLD_LOCAL: TensorRT 8.6 finds no plugin in libraries that are
// loaded later when its own symbols are global). It stays loaded: threads and exit handlers of NVIDIA's libraries do
// not survive being unloaded. Copies are the same library.
class Library {
public:
    // Loads a library by its file name from the first folder that has it, else from where the system looks. A file that
    // is there and cannot be loaded is not passed over.
    Library(const std::string& name, const std::vector<std::filesystem::path>& folders);

    // Whether it was loaded. Where not, why() has the words of the loader.
    explicit operator bool() const { return handle_ != nullptr; }
    const std::string& why() const { return why_; }

    // Equal for equal libraries, however they were found.
    const void* handle() const { return handle_; }

    // One of its functions; null where it has none of that name.
    template <typename Function>
    Function* function(const char* name) const {
        return reinterpret_cast<Function*>(address(name));
    }

private:
    void* address(const char* name) const;

    void* handle_ = nullptr;
    std::string why_;
};

// The bytes of a library as a file that nobody can change between the check of them and their loading. Libraries that
// it needs are not found beside it.
class LibraryCopy {
public:
    // In memory, sealed, where it stays to the end of the process; where that is not wanted, or the system has no such
    // files to be run, in a folder of this process alone, which goes with this object.
    //
    // sha256: of the bytes.
    //
    // Throws EngineError: the folder cannot be written.
    LibraryCopy(
        const std::string& name, const std::vector<char>& bytes, const std::string& sha256, bool in_memory = true);
    ~LibraryCopy();

    LibraryCopy(const LibraryCopy&) = delete;
    LibraryCopy& operator=(const LibraryCopy&) = delete;

    // Of no other bytes as long as the process runs: the loader takes a path that it knows for the library that it
    // knows.
    const std::string& path() const { return path_; }

private:
    std::string path_;
    std::filesystem::path folder_;  // empty where it is in memory
};

}  // namespace trtdet
