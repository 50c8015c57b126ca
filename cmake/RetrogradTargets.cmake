# What every target of ours has in common.

add_library(retrograd_warnings INTERFACE)
target_compile_options(retrograd_warnings INTERFACE -Wall -Wextra -Wpedantic -Werror)

if(RETROGRAD_SANITIZE)
  # vptr needs type information that libtorch does not export.
  add_compile_options(-fsanitize=${RETROGRAD_SANITIZE} -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${RETROGRAD_SANITIZE})
  if(RETROGRAD_SANITIZE MATCHES "undefined")
    add_compile_options(-fno-sanitize=vptr -fno-sanitize-recover=undefined)
    add_link_options(-fno-sanitize=vptr)
  endif()
  if(RETROGRAD_SANITIZE MATCHES "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ThreadSanitizer does not see fences, and GCC says so wherever torch's headers have one. Ours have none.
    add_compile_options(-Wno-tsan)
  endif()
endif()
if(RETROGRAD_FUZZ)
  if(NOT CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    message(FATAL_ERROR "RETROGRAD_FUZZ needs clang: use the preset fuzz.")
  endif()
  add_compile_options(-fsanitize=fuzzer-no-link)
endif()

# retrograd_sources(<variable> <glob>...): the files that match, looked up again at every build.
function(retrograd_sources variable)
  file(GLOB found CONFIGURE_DEPENDS LIST_DIRECTORIES FALSE ${ARGN})
  set(${variable} ${found} PARENT_SCOPE)
endfunction()

# retrograd_torch_executable(<name> <source>...): a program on libretrograd, with libretrograd's precompiled header.
# A precompiled header is only good for the same position-independence flag, hence -fPIC where CMake would say -fPIE.
function(retrograd_torch_executable name)
  add_executable(${name} ${ARGN})
  set_target_properties(${name} PROPERTIES POSITION_INDEPENDENT_CODE OFF)
  target_compile_options(${name} PRIVATE -fPIC)
  target_link_libraries(${name} PRIVATE retrograd retrograd_warnings)
  target_precompile_headers(${name} REUSE_FROM retrograd)
endfunction()
