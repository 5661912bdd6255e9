// What of the library's functions and classes programs can link with; all others stay within it.
#pragma once

#if defined(__GNUC__)
#define TRTDET_API __attribute__((visibility("default")))
#else
#define TRTDET_API
#endif
