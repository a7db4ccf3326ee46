// GCC 11 and later call this function of their C++ runtime where a vector's length is checked. Runtimes before it do not
// have the function, and a library compiled elsewhere would not load there.
#include <new>

#ifdef __GLIBCXX__
namespace std {
[[noreturn]] __attribute__((visibility("hidden"))) void __throw_bad_array_new_length() { throw std::bad_alloc(); }
}  // namespace std
#endif
