/* A stand-in for NVIDIA's driver on machines without a GPU: "device" memory is a memfd, a stream does at once what it
 * is told. It keeps the driver's rules that Leto's code could break: sizes are multiples of 2 MiB, memory is mapped
 * before it is accessed and unmapped by whole handles, what is not mapped or not allowed faults. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#define PAGE (2ul << 20)
enum { OK = 0, INVALID = 1, OUT_OF_MEMORY = 2, NO_DEVICE = 101 };
typedef struct { int type, handle_types, location_type, location_id; void *security; unsigned char flags[8]; } properties;
typedef struct { int location_type, location_id, flags; } access_t;

int cuInit(unsigned flags) { return flags ? INVALID : OK; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return ordinal < 0 || ordinal > 1 ? NO_DEVICE : OK; }
int cuGetErrorName(int code, const char **text) {
  *text = code == INVALID ? "CUDA_ERROR_INVALID_VALUE" : code == OUT_OF_MEMORY ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR";
  return OK;
}
/* A handle is a descriptor + 1. */
int cuMemCreate(uint64_t *handle, size_t size, const properties *p, uint64_t flags) {
  if (flags || !size || size % PAGE || p->type != 1 || p->handle_types != 1 || p->location_type != 1) return INVALID;
  if (size > (1ul << 40)) return OUT_OF_MEMORY;
  int fd = memfd_create("device memory", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, (off_t)size)) return OUT_OF_MEMORY;
  *handle = (uint64_t)fd + 1;
  return OK;
}
int cuMemRelease(uint64_t handle) { return close((int)handle - 1) ? INVALID : OK; }
int cuMemExportToShareableHandle(int *fd, uint64_t handle, int type, uint64_t flags) {
  if (type != 1 || flags) return INVALID;
  *fd = dup((int)handle - 1);
  return *fd < 0 ? OUT_OF_MEMORY : OK;
}
int cuMemImportFromShareableHandle(uint64_t *handle, void *fd, int type) {
  int copy = type == 1 ? dup((int)(intptr_t)fd) : -1;
  *handle = (uint64_t)copy + 1;
  return copy < 0 ? INVALID : OK;
}
int cuMemAddressReserve(uint64_t *address, size_t size, size_t alignment, uint64_t hint, uint64_t flags) {
  if (!size || size % PAGE || alignment || flags) return INVALID;
  if (hint) { /* it answers a range that is taken with an error */
    void *there = mmap((void *)hint, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED_NOREPLACE, -1, 0);
    *address = hint;
    return there == MAP_FAILED ? OUT_OF_MEMORY : OK;
  }
  char *at = mmap(NULL, size + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (at == MAP_FAILED) return OUT_OF_MEMORY;
  char *aligned = (char *)(((uintptr_t)at + PAGE - 1) / PAGE * PAGE);
  if (aligned > at) munmap(at, (size_t)(aligned - at));
  munmap(aligned + size, (size_t)(at + PAGE - aligned));
  *address = (uint64_t)(uintptr_t)aligned;
  return OK;
}
int cuMemAddressFree(uint64_t address, size_t size) { return munmap((void *)address, size) ? INVALID : OK; }
int cuMemMap(uint64_t address, size_t size, size_t offset, uint64_t handle, uint64_t flags) {
  struct stat status;
  if (offset || flags || address % PAGE || fstat((int)handle - 1, &status) || (size_t)status.st_size != size) return INVALID;
  void *at = mmap((void *)address, size, PROT_NONE, MAP_SHARED | MAP_FIXED, (int)handle - 1, 0);
  return at == MAP_FAILED ? INVALID : OK;
}
int cuMemUnmap(uint64_t address, size_t size) {
  void *at = mmap((void *)address, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return at == MAP_FAILED ? INVALID : OK;
}
int cuMemSetAccess(uint64_t address, size_t size, const access_t *access, size_t count) {
  if (count != 1 || (access->flags != 1 && access->flags != 3)) return INVALID;
  return mprotect((void *)address, size, access->flags) ? INVALID : OK;
}
int cuMemHostRegister_v2(void *at, size_t size, unsigned flags) {
  (void)flags; /* like the driver, it needs writable pages */
  return madvise(at, size, MADV_POPULATE_WRITE) ? INVALID : OK;
}
int cuMemHostUnregister(void *at) { return at ? OK : INVALID; }
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t size, void *stream) {
  (void)stream;
  memcpy(to, (void *)from, size);
  return OK;
}
int cuStreamWriteValue64_v2(void *stream, uint64_t address, uint64_t value, unsigned flags) {
  (void)stream;
  if (flags || address % 8) return INVALID;
  __atomic_store_n((uint64_t *)address, value, __ATOMIC_SEQ_CST);
  return OK;
}
int cuModuleLoadData(void **module, const char *image) { *module = (void *)image; return OK; }
int cuModuleGetFunction(void **function, void *module, const char *name) { *function = module; return name ? OK : INVALID; }
int cuLaunchKernel(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *stream,
                   void **arguments, void **extra) {
  (void)f, (void)a, (void)b, (void)c, (void)d, (void)e, (void)g, (void)h, (void)stream, (void)arguments, (void)extra;
  abort(); /* the only kernel that is launched this way is a trap */
}
