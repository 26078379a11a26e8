// SPDX-License-Identifier: GPL-2.0-only
#include "ring.h"

#include <cstdio>
#include <cstring>
#include <mutex>

#include <dirent.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "protocol.h"

namespace millrace {

namespace {

/* Devices of QEMU's ivshmem; the second memory BAR is the memory. */
constexpr const char *DEVICES = "/sys/bus/pci/devices";
constexpr unsigned VENDOR = 0x1af4, DEVICE = 0x1110;

constexpr size_t MAX_REGION_BYTES = 1 << 30;

std::mutex cache_lock;
std::string cached_path;
std::weak_ptr<Region> cached_region;

unsigned read_number(const std::string &path)
{
    unsigned number = 0;
    FILE *file = fopen(path.c_str(), "re");
    if (!file)
        return 0;
    if (fscanf(file, "%x", &number) != 1)
        number = 0;
    fclose(file);
    return number;
}

std::shared_ptr<Region> map_region(const std::string &path)
{
    int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return nullptr;
    struct stat status;
    std::shared_ptr<Region> region;
    if (fstat(fd, &status) == 0 && status.st_size > static_cast<off_t>(SLOTS_OFF) &&
        status.st_size <= static_cast<off_t>(MAX_REGION_BYTES)) {
        size_t bytes = static_cast<size_t>(status.st_size);
        void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        if (base != MAP_FAILED)
            region = std::make_shared<Region>(base, bytes);
    }
    close(fd);
    return region && region->is_valid() ? region : nullptr;
}

/* Elsewhere than on x86 the memory of a device is not mapped as memory: functions that copy
 * bytes may fault there. */
#if defined(__x86_64__) || defined(__i386__)
constexpr bool IS_MEMORY = true;
#else
constexpr bool IS_MEMORY = false;
#endif

std::shared_ptr<Region> find_device()
{
    if (!IS_MEMORY)
        return nullptr;
    DIR *folder = opendir(DEVICES);
    if (!folder)
        return nullptr;
    std::shared_ptr<Region> region;
    while (dirent *entry = readdir(folder)) {
        std::string device = std::string(DEVICES) + "/" + entry->d_name;
        if (read_number(device + "/vendor") == VENDOR && read_number(device + "/device") == DEVICE)
            region = map_region(device + "/resource2");
        if (region)
            break;
    }
    closedir(folder);
    return region;
}

/* Places of the parts of a direction in a slot. */
struct Direction {
    size_t tail, waits, head, sleeps, data;
};
constexpr Direction TO_HOST = {0, 8, 64, 72, 4096};
constexpr Direction TO_CLIENT = {128, 136, 192, 200, 4096 + DATA_BYTES};

uint64_t load(uint8_t *slot, size_t off)
{
    return __atomic_load_n(reinterpret_cast<uint64_t *>(slot + off), __ATOMIC_ACQUIRE);
}
void store(uint8_t *slot, size_t off, uint64_t value)
{
    __atomic_store_n(reinterpret_cast<uint64_t *>(slot + off), value, __ATOMIC_RELEASE);
}

} // namespace

std::shared_ptr<Region> Region::find(const std::string &path)
{
    std::lock_guard<std::mutex> guard(cache_lock);
    std::shared_ptr<Region> region = cached_region.lock();
    if (region && cached_path == path && region->is_valid())
        return region;
    region = path == "auto" ? find_device() : map_region(path);
    cached_region = region;
    cached_path = path;
    return region;
}

void Region::forget(const std::shared_ptr<Region> &region)
{
    std::lock_guard<std::mutex> guard(cache_lock);
    if (cached_region.lock() == region)
        cached_region.reset();
}

Region::~Region() { munmap(base_, bytes_); }

bool Region::is_valid() const
{
    RegionHead head;
    memcpy(&head, base_, sizeof(head));
    return head.magic == REGION_MAGIC && head.version == REGION_VERSION;
}

void Region::copy_id(uint8_t id[16]) const
{
    RegionHead head;
    memcpy(&head, base_, sizeof(head));
    memcpy(id, head.id, sizeof(head.id));
}

uint8_t *Region::slot(uint32_t number) const
{
    size_t slots = (bytes_ - SLOTS_OFF) / SLOT_BYTES;
    return number < slots ? base_ + SLOTS_OFF + number * SLOT_BYTES : nullptr;
}

ssize_t Ring::write(const void *from, size_t bytes)
{
    uint64_t used = tail_ - load(slot_, TO_HOST.head);
    if (used > DATA_BYTES)
        return -1;
    size_t room = DATA_BYTES - static_cast<size_t>(used), n = bytes < room ? bytes : room;
    size_t off = tail_ % DATA_BYTES, first = n < DATA_BYTES - off ? n : DATA_BYTES - off;
    if (n == 0)
        return 0;
    memcpy(slot_ + TO_HOST.data + off, from, first);
    memcpy(slot_ + TO_HOST.data, static_cast<const uint8_t *>(from) + first, n - first);
    tail_ += n;
    store(slot_, TO_HOST.tail, tail_);
    return static_cast<ssize_t>(n);
}

ssize_t Ring::read(void *to, size_t max_bytes)
{
    uint64_t available = load(slot_, TO_CLIENT.tail) - head_;
    if (available > DATA_BYTES)
        return -1;
    size_t n = available < max_bytes ? static_cast<size_t>(available) : max_bytes;
    size_t off = head_ % DATA_BYTES, first = n < DATA_BYTES - off ? n : DATA_BYTES - off;
    if (n == 0)
        return 0;
    memcpy(to, slot_ + TO_CLIENT.data + off, first);
    memcpy(static_cast<uint8_t *>(to) + first, slot_ + TO_CLIENT.data, n - first);
    head_ += n;
    store(slot_, TO_CLIENT.head, head_);
    return static_cast<ssize_t>(n);
}

bool Ring::is_own() const { return load(slot_, STAMP_OFF) == stamp_; }
bool Ring::has_bytes() const { return load(slot_, TO_CLIENT.tail) != head_; }
bool Ring::must_ring_reader() { return take_flag(TO_HOST.sleeps); }
bool Ring::must_ring_writer() { return take_flag(TO_CLIENT.waits); }

bool Ring::set_flag(size_t off, uint32_t value)
{
    if (!is_own())
        return false;
    __atomic_store_n(reinterpret_cast<uint32_t *>(slot_ + off), value, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return true;
}

bool Ring::take_flag(size_t off)
{
    uint32_t *flag = reinterpret_cast<uint32_t *>(slot_ + off);
    if (!is_own())
        return false;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return __atomic_load_n(flag, __ATOMIC_RELAXED) != 0 &&
           __atomic_exchange_n(flag, 0, __ATOMIC_RELAXED) != 0;
}

bool Ring::sleep()
{
    if (!set_flag(TO_CLIENT.sleeps, 1))
        return false;
    if (!has_bytes())
        return true;
    wake();
    return false;
}

void Ring::wake() { set_flag(TO_CLIENT.sleeps, 0); }

bool Ring::wait_for_room()
{
    if (!set_flag(TO_HOST.waits, 1))
        return false;
    if (tail_ - load(slot_, TO_HOST.head) >= DATA_BYTES)
        return true;
    set_flag(TO_HOST.waits, 0);
    return false;
}

} // namespace millrace
