// SPDX-License-Identifier: GPL-2.0-only
/* Growing buffer of bytes. Not std::string: bytes that are about to be read or packed are not
 * zeroed first, and batches of a megabyte are handed on without a copy. */
#ifndef MILLRACE_BYTES_H
#define MILLRACE_BYTES_H

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace millrace {

class Bytes {
public:
    Bytes() = default;
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;
    Bytes(Bytes &&other) noexcept { swap(other); }
    Bytes &operator=(Bytes &&other) noexcept
    {
        swap(other);
        return *this;
    }
    ~Bytes() { free(data_); }

    void swap(Bytes &other) noexcept
    {
        std::swap(data_, other.data_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
    }

    uint8_t *data() { return data_; }
    const uint8_t *data() const { return data_; }
    const uint8_t *end() const { return data_ + size_; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }
    void clear() { size_ = 0; }
    /* Clears, and frees the memory of a huge row or batch, which small ones do not need. */
    void clear_and_trim(size_t max_capacity)
    {
        size_ = 0;
        if (capacity_ <= max_capacity)
            return;
        free(data_);
        data_ = nullptr;
        capacity_ = 0;
    }
    void shrink_to(size_t size) { size_ = size < size_ ? size : size_; }

    void reserve(size_t more)
    {
        if (capacity_ - size_ >= more)
            return;
        size_t capacity = capacity_ * 2 > size_ + more ? capacity_ * 2 : size_ + more;
        void *memory = realloc(data_, capacity < 256 ? 256 : capacity);
        if (!memory)
            throw std::bad_alloc();
        data_ = static_cast<uint8_t *>(memory);
        capacity_ = capacity < 256 ? 256 : capacity;
    }
    /* Appends this many bytes of any content. */
    uint8_t *grow(size_t more)
    {
        reserve(more);
        size_ += more;
        return data_ + size_ - more;
    }
    void append(const void *from, size_t bytes)
    {
        if (bytes)
            memcpy(grow(bytes), from, bytes);
    }
    void append(const Bytes &other) { append(other.data_, other.size_); }
    void push(uint8_t byte) { *grow(1) = byte; }
    void assign(const void *from, size_t bytes)
    {
        size_ = 0;
        append(from, bytes);
    }
    void assign(const Bytes &other) { assign(other.data_, other.size_); }
    bool equals(const Bytes &other) const
    {
        return size_ == other.size_ && (size_ == 0 || memcmp(data_, other.data_, size_) == 0);
    }

private:
    uint8_t *data_ = nullptr;
    size_t size_ = 0;
    size_t capacity_ = 0;
};

} // namespace millrace

#endif
