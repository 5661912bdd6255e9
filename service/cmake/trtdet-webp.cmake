# trtdet::webp, where it is found: decoding. Debian has no CMake file of it.
find_path(WEBP_INCLUDE_DIR webp/decode.h)
find_library(WEBP_LIBRARY webp)
if(WEBP_INCLUDE_DIR AND WEBP_LIBRARY AND NOT TARGET trtdet::webp)
  add_library(trtdet::webp INTERFACE IMPORTED)
  set_target_properties(trtdet::webp PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${WEBP_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "${WEBP_LIBRARY}")
endif()
