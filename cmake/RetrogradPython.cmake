# The Python interpreter whose torch and oneTBB we build against. In a development tree it is .venv's.
if(SKBUILD OR DEFINED Python_EXECUTABLE)
  # Given: by scikit-build-core, a preset or the command line.
elseif(EXISTS "${PROJECT_SOURCE_DIR}/.venv/bin/python")
  set(Python_EXECUTABLE "${PROJECT_SOURCE_DIR}/.venv/bin/python")
endif()
if(RETROGRAD_CACHE_ONLY)
  find_package(Python 3.11 QUIET COMPONENTS Interpreter)
elseif(RETROGRAD_PYTHON)
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter Development.Module)
else()
  find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)
endif()
