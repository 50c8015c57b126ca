# oneTBB: PyPI's tbb-devel next to the Python interpreter if it is there, else the system's.
set(_retrograd_tbb_hints "")
if(Python_EXECUTABLE)
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c "import sys; print(sys.prefix)"
    OUTPUT_VARIABLE _retrograd_python_prefix OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  # tbb-devel in a build environment of its own (pip's build isolation) lies where its metadata says.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
            "import importlib.metadata as m; print(next(str(f.locate().resolve().parent) for f in m.files('tbb-devel') if f.name == 'TBBConfig.cmake'))"
    OUTPUT_VARIABLE _retrograd_tbb_config OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  list(APPEND _retrograd_tbb_hints "${_retrograd_tbb_config}" "${_retrograd_python_prefix}")
endif()
find_package(TBB CONFIG QUIET HINTS ${_retrograd_tbb_hints})
if(NOT TBB_FOUND)
  message(FATAL_ERROR "oneTBB was not found: run `make setup`, or install it with `pip install tbb-devel` or "
                      "`apt-get install libtbb-dev`.")
endif()
