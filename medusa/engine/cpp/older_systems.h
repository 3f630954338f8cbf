// Included before all else where kernels are compiled for a wheel: what a new compiler would take from its own
// system's libraries, and older ones do not have. So they run wherever torch's own wheels do (glibc 2.28).

#pragma once

#include <cxxabi.h>

#include <istream>
#include <new>
#include <string>

// Streams of texts are compiled here and not called: some of their functions are of GCC 9 and 11.
#if defined(_GLIBCXX_EXTERN_TEMPLATE)
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 0
#include <sstream>
#undef _GLIBCXX_EXTERN_TEMPLATE
#define _GLIBCXX_EXTERN_TEMPLATE 1
#endif

// Whether there is one thread alone, which glibc tells since 2.32: no, as far as this library is concerned.
extern "C" {
__attribute__((weak, visibility("hidden"))) char __libc_single_threaded = 0;
}

// Of GCC 11.
namespace std {
__attribute__((weak, noreturn, visibility("hidden"))) void __throw_bad_array_new_length() {
  __cxxabiv1::__cxa_throw_bad_array_new_length();
}
}  // namespace std
