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

static bool file_begins_with(const std::string &path, const char *text)
{
    char line[64] = {};
    FILE *file = fopen(path.c_str(), "re");
    bool is_match =
        file && fgets(line, sizeof(line), file) && strncmp(line, text, strlen(text)) == 0;
    if (file)
        fclose(file);
    return is_match;
}

/* Enables or disables a device: no driver does it, and its memory cannot be read otherwise. The
 * kernel counts this, so that other devices end in their old state. */
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

/* Gives the memory of a device to the user. False: the device is not Millrace's. */
static bool hand_over(const std::string &device, const passwd *user)
{
    std::string memory = device + "/resource2";
    int fd = open(memory.c_str(), O_RDWR | O_CLOEXEC);
    if (fd < 0)
        return false;
    bool is_match = is_region(fd);
    if (is_match && (fchown(fd, user->pw_uid, user->pw_gid) || fchmod(fd, 0600)))
        fprintf(stderr, "millrace-ring: %s: %s\n", memory.c_str(), strerror(errno));
    else if (is_match)
        printf("millrace-ring: %s is %s's\n", memory.c_str(), user->pw_name);
    close(fd);
    return is_match;
}

int main(int count, char **words)
{
    const passwd *user = count == 2 ? getpwnam(words[1]) : nullptr;
    DIR *folder = user ? opendir(DEVICES) : nullptr;
    if (!folder) {
        fprintf(stderr, user ? "millrace-ring: no PCI devices\n" : "usage: millrace-ring USER\n");
        return user ? 1 : 2;
    }
    bool has_device = false;
    while (dirent *entry = readdir(folder)) {
        std::string device = std::string(DEVICES) + "/" + entry->d_name;
        if (!file_begins_with(device + "/vendor", "0x1af4") ||
            !file_begins_with(device + "/device", "0x1110"))
            continue;
        enable(device, true);
        if (hand_over(device, user))
            has_device = true;
        else
            enable(device, false);
    }
    closedir(folder);
    if (!has_device)
        fprintf(stderr, "millrace-ring: there is no memory that is shared with Millrace\n");
    return has_device ? 0 : 1;
}
