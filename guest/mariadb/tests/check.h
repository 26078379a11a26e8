// SPDX-License-Identifier: GPL-2.0-only
/* Checks and result of the test programs that need no server. */
#pragma once
#include <cstdio>

namespace {

int passed, failed;

void check(bool is_good, const char *name)
{
    is_good ? passed++ : failed++;
    if (!is_good)
        printf("failed: %s\n", name);
}

/* Prints the last line. Returns the program's exit status. */
int report()
{
    printf("%d passed, %d failed\n", passed, failed);
    return failed != 0;
}

} // namespace
