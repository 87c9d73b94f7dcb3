// Plain C between the torch-free CUDA files and the torch side. Every function returns nullptr or the text of an error.
#pragma once
#include <cstdint>

extern "C" {
// Why this binary cannot run on the device.
const char* attngeo_device_problem(int device);
}
