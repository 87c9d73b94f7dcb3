// Stands in for OpenCV's umbrella header while FFCV is built: only the two modules that are installed.
#ifndef ATTNGEO_OPENCV_MIN_HPP
#define ATTNGEO_OPENCV_MIN_HPP
#include <opencv2/core.hpp>
#include <opencv2/imgproc.hpp>
#endif
