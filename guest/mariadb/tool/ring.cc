// SPDX-License-Identifier: GPL-2.0-only
/* millrace-ring USER: switches the memory device that is shared with the host on, and gives it
 * to the user that the database runs as. Run as root in front of the database: other programs of
 * the guest get no access, and devices that are not Millrace's are not touched. */
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include <dirent.h>
#include <fcntl.h>
#include <pwd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "../protocol.h"

static const char *DEVICES = "/sys/bus/pci/devices";

static bool has(const std::string &path, const char *text)
{
    char line[64] = {};
    FILE *file = fopen(path.c_str(), "re");
    bool is_it = file && fgets(line, sizeof(line), file) && strncmp(line, text, strlen(text)) == 0;
    if (file)
        fclose(file);
    return is_it;
}

/* Enables a device, whose memory cannot be read otherwise: no driver does it. The kernel counts
 * this, so that other devices end as they were. */
static void enable(const std::string &device, bool on)
{
    FILE *file = fopen((device + "/enable").c_str(), "we");
    if (!file)
        return;
    fputs(on ? "1" : "0", file);
    fclose(file);
}

static bool is_region(int fd)
{
    millrace::RegionHead head;
    void *base = mmap(nullptr, 4096, PROT_READ, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED)
        return false;
    memcpy(&head, base, sizeof(head));
    munmap(base, 4096);
    return head.magic == millrace::REGION_MAGIC;
}

/* True: the device is Millrace's. */
static bool give(const std::string &device, const passwd *user)
{
    std::string memory = device + "/resource2";
    int fd = open(memory.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool is_it = is_region(fd);
    if (is_it && (fchown(fd, user->pw_uid, user->pw_gid) || fchmod(fd, 0600)))
        fprintf(stderr, "millrace-ring: %s: %s\n", memory.c_str(), strerror(errno));
    else if (is_it)
        printf("millrace-ring: %s is %s's\n", memory.c_str(), user->pw_name);
    close(fd);
    return is_it;
}

int main(int count, char **words)
{
    const passwd *user = count == 2 ? getpwnam(words[1]) : nullptr;
    DIR *folder = user ? opendir(DEVICES) : nullptr;
    if (!folder) {
        fprintf(stderr, user ? "millrace-ring: no PCI devices\n" : "usage: millrace-ring USER\n");
        return user ? 1 : 2;
    }
    bool is_there = false;
    while (dirent *entry = readdir(folder)) {
        std::string device = std::string(DEVICES) + "/" + entry->d_name;
        if (!has(device + "/vendor", "0x1af4") || !has(device + "/device", "0x1110"))
            continue;
        enable(device, true);
        if (give(device, user))
            is_there = true;
        else
            enable(device, false);
    }
    closedir(folder);
    if (!is_there)
        fprintf(stderr, "millrace-ring: there is no memory that is shared with Millrace\n");
    return is_there ? 0 : 1;
}
