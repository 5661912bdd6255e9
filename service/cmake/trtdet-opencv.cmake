# trtdet::opencv, where it is found: resizing as detectors were trained with. Debian has OpenCV's own CMake file only in the
# package of all its modules.
find_path(OPENCV_INCLUDE_DIR opencv2/imgproc.hpp PATH_SUFFIXES opencv4)
find_library(OPENCV_CORE opencv_core)
find_library(OPENCV_IMGPROC opencv_imgproc)
if(OPENCV_INCLUDE_DIR AND OPENCV_CORE AND OPENCV_IMGPROC AND NOT TARGET trtdet::opencv)
  add_library(trtdet::opencv INTERFACE IMPORTED)
  set_target_properties(trtdet::opencv PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${OPENCV_INCLUDE_DIR}"
    INTERFACE_LINK_LIBRARIES "${OPENCV_IMGPROC};${OPENCV_CORE}")
endif()
