// What backend.cpp, kernels.cpp and module.cpp share.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "simdev/runtime.h"

namespace simdev {

inline constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;

c10::Allocator& allocator();
const BlockPtr& block_of(const c10::DataPtr& data);

// Makes PrivateUse1 the process's accelerator. Once, before the process's first backward: the stock engine looks at the
// devices that there are when it starts its threads.
void register_device();

}  // namespace simdev
