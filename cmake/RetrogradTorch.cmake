# libtorch out of the interpreter's torch package. The engine is written against one version's internals.
set(RETROGRAD_TORCH_VERSION "2.13.0")
execute_process(
  COMMAND "${Python_EXECUTABLE}" -c "import torch; print(torch.__version__.partition('+')[0]); print(torch.utils.cmake_prefix_path)"
  OUTPUT_VARIABLE _retrograd_torch OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE _retrograd_torch_rc)
if(NOT _retrograd_torch_rc EQUAL 0)
  message(FATAL_ERROR "PyTorch cannot be imported by ${Python_EXECUTABLE}: run `make setup`, or "
                      "`pip install torch==${RETROGRAD_TORCH_VERSION}`.")
endif()
string(REPLACE "\n" ";" _retrograd_torch "${_retrograd_torch}")
list(GET _retrograd_torch 0 _retrograd_torch_version)
list(GET _retrograd_torch 1 _retrograd_torch_prefix)
if(NOT _retrograd_torch_version STREQUAL RETROGRAD_TORCH_VERSION)
  message(FATAL_ERROR "retrograd needs torch==${RETROGRAD_TORCH_VERSION} but ${Python_EXECUTABLE} has "
                      "${_retrograd_torch_version}: run `pip install torch==${RETROGRAD_TORCH_VERSION}`.")
endif()
list(APPEND CMAKE_PREFIX_PATH "${_retrograd_torch_prefix}")
find_package(Torch REQUIRED CONFIG)
find_library(RETROGRAD_TORCH_PYTHON_LIBRARY torch_python PATHS "${TORCH_INSTALL_PREFIX}/lib" NO_DEFAULT_PATH REQUIRED)
if(TARGET caffe2::mkl)
  # Torch names MKL's folders of the machine that built it; they do not exist here and would only lengthen rpaths.
  set_property(TARGET caffe2::mkl PROPERTY INTERFACE_LINK_DIRECTORIES "")
endif()
