// For builds with ThreadSanitizer: libstdc++ counts the references to an exception inside its own library, which is not
// instrumented. An exception that is read in one thread and freed in another, by whoever lets go last, would be
// reported as a race; what frees it is not looked at.
//
// Debian's gRPC, and Abseil below it, are not instrumented either and synchronise by atomics of their own: what they
// hand from one of their threads to another, calls and messages among it, would be reported wherever a template of
// their headers, in this program, touches it. So what happens in or below a function of gRPC is not judged, a call's
// handler included; what the service's own threads do with the request then is.
#include <dlfcn.h>

extern "C" {

void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);

const char* __tsan_default_suppressions() {
    return "race:std::runtime_error::~runtime_error\n"
           "race:std::logic_error::~logic_error\n"
           "race:grpc::\n"
           "race:libgpr\n"
           "race:libgrpc\n"
           "race:libabsl\n";
}

void __cxa_free_exception(void* thrown) noexcept {
    static const auto free_exception = reinterpret_cast<void (*)(void*)>(dlsym(RTLD_NEXT, "__cxa_free_exception"));
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
    free_exception(thrown);
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
}
}
